// Only in builds with CUDA.
#include "csrc/pytorch/cuda/cuda_backend.h"
#include "csrc/bindings/bindings.h"
#include "csrc/pytorch/cuda/cuda_budget.h"
#include "csrc/transfer/cuda/cuda_numa_node.h"
#include "csrc/transfer/cuda/cuda_pinner.h"

namespace py = pybind11;

namespace hydra {

namespace {

using Released = py::call_guard<py::gil_scoped_release>;

/// The arena owns its pinner through the pointer that Python holds.
std::shared_ptr<HostArena> make_arena(int device, const std::string& sysfs) {
  struct PinnedArena {
    PinnedArena(int on_device, std::optional<NumaNode> node) : pinner(on_device), arena(&pinner, node) {}
    CudaPinner pinner;  // outlives the arena
    HostArena arena;
  };
  auto both = std::make_shared<PinnedArena>(device, cuda_numa_node(device, sysfs));
  return {both, &both->arena};
}

std::uintptr_t as_number(cudaStream_t stream) { return reinterpret_cast<std::uintptr_t>(stream); }

}  // namespace

void bind_cuda(py::module_& module) {
  py::class_<CudaMemory>(module, "CudaMemory")
      .def_readonly("total", &CudaMemory::total)
      .def_readonly("allocated", &CudaMemory::allocated)
      .def_readonly("reserved", &CudaMemory::reserved)
      .def_readonly("reserved_peak", &CudaMemory::reserved_peak)
      .def_readonly("slots", &CudaMemory::slots)
      .def_readonly("outside", &CudaMemory::outside);
  py::class_<CudaBackend, DeviceBackend, std::shared_ptr<CudaBackend>>(module, "CudaBackend")
      .def("memory", &CudaBackend::memory, Released())
      .def_property_readonly("device_index", &CudaBackend::device)
      .def_property_readonly("home_stream", [](const CudaBackend& device) { return as_number(device.home()); })
      .def_property_readonly("to_device_stream",
                             [](const CudaBackend& device) { return as_number(device.to_device_stream()); })
      .def_property_readonly("to_host_stream",
                             [](const CudaBackend& device) { return as_number(device.to_host_stream()); });
  module.def("cuda_budgets", &CudaBudget::sum, py::arg("device_index"), Released(),
             "The sum of the budgets of the runs on a device, in bytes.");
  module.def("make_cuda_backend", &CudaBackend::make, py::arg("device_index"), Released());
  module.def("make_cuda_arena", &make_arena, py::arg("device_index"), py::arg("sysfs") = "/sys",
             "A host arena whose regions are page-locked, and lie next to the device.");
}

}  // namespace hydra
