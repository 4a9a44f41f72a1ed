#include "csrc/bindings/bindings.h"
#include "csrc/paging/pager_statistics.h"

namespace py = pybind11;

namespace hydra {

void bind_paging(py::module_& module) {
  py::class_<PagerStatistics>(module, "PagerStatistics")
      .def_readonly("loads", &PagerStatistics::loads)
      .def_readonly("prefetched", &PagerStatistics::prefetched)
      .def_readonly("faults", &PagerStatistics::faults)
      .def_readonly("evictions", &PagerStatistics::evictions)
      .def_readonly("spills", &PagerStatistics::spills)
      .def_readonly("write_backs", &PagerStatistics::write_backs)
      .def_readonly("order_changes", &PagerStatistics::order_changes)
      .def_readonly("loaded_bytes", &PagerStatistics::loaded_bytes)
      .def_readonly("written_back_bytes", &PagerStatistics::written_back_bytes)
      .def_readonly("hook_wait_seconds", &PagerStatistics::hook_wait_seconds)
      .def_readonly("fault_wait_seconds", &PagerStatistics::fault_wait_seconds)
      .def_readonly("drain_wait_seconds", &PagerStatistics::drain_wait_seconds);
}

}  // namespace hydra
