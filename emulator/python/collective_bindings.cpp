// The class that torch.distributed knows as ProcessGroupNCCL.
#include <pybind11/chrono.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "emulator/python/bindings.h"
#include "emulator/torch/process_group_nccl.h"

namespace emulated_cuda {

void bind_collectives(pybind11::module_& module) {
  namespace py = pybind11;
  using Group = ProcessGroupNccl;
  using NoLock = py::call_guard<py::gil_scoped_release>;
  py::module_::import("torch._C._distributed_c10d");  // the base classes
  py::class_<Group, c10::intrusive_ptr<Group>, c10d::Backend> group(module, "ProcessGroupNCCL");
  py::class_<Group::Options, c10::intrusive_ptr<Group::Options>, c10d::Backend::Options>(group, "Options")
      .def(py::init<bool>(), py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &Group::Options::is_high_priority_stream)
      .def_readwrite("split_from", &Group::Options::split_from)
      .def_readwrite("split_color", &Group::Options::split_color);
  group
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       const c10::intrusive_ptr<Group::Options>& options) {
             return c10::make_intrusive<Group>(store, rank, size, options);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"), NoLock())
      .def("_group_start", [](const Group&) {})
      .def("_group_end", [](const Group&) {})
      .def("perform_nocolor_split", [](const Group&, const c10::Device&) {})
      .def("_set_default_timeout", &Group::setTimeout, NoLock())
      .def("abort", &Group::abort, NoLock())
      .def("_communicators", &Group::communicators)
      .def_property_readonly("uid", [](const Group& self) { return self.getID(); });
}

}  // namespace emulated_cuda
