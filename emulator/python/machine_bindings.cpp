#include <cstdint>
#include <string>

#include "emulator/cudart/control.h"
#include "emulator/python/bindings.h"
#include "emulator/torch/result_shapes.h"
#include "emulator/torch/stream_work.h"
#include "emulator/torch/workspaces.h"

namespace emulated_cuda {

namespace {

void start_again() {
  reset();
  forget_fault();
  reset_workspace_bytes();
  clear_workspaces();
}

void fail_call(const std::string& call, int error, int successes) {
  fail(call, static_cast<cudaError_t>(error), successes);
}

std::pair<std::int64_t, std::int64_t> operator_calls() {
  const CallCounts counts = call_counts();
  return {counts.behind, counts.waited};
}

}  // namespace

void bind_machine(pybind11::module_& module) {
  namespace py = pybind11;
  add(
      module, "configure", [](int devices, std::size_t bytes) { configure({devices, bytes}); }, py::kw_only(),
      py::arg("devices"), py::arg("bytes"));
  add(module, "reset", &start_again);
  add(module, "memory_is_guarded", [] { return memory_is_guarded(); });
  add(module, "set_delays", &set_delays, py::arg("longest_seconds"), py::arg("seed"));
  add(module, "fail", &fail_call, py::arg("call"), py::arg("error"), py::arg("successes") = 0);
  add(
      module, "set_fault", [](int device, int error) { set_fault(device, static_cast<cudaError_t>(error)); },
      py::arg("device"), py::arg("error"));
  add(module, "fault_message", &fault_message);
  add(
      module, "device_of", [](std::uintptr_t address) { return device_of(reinterpret_cast<const void*>(address)); },
      py::arg("address"));
  add(module, "streams", [] { return streams(); });
  add(module, "events", [] { return events(); });
  add(module, "registrations", [] { return registrations(); });
  add(module, "allocations", [] { return allocations(); });
  add(module, "wrong_device", [] { return wrong_device(); });
  add(module, "calls", &calls, py::arg("name"));
  add(module, "operator_calls", &operator_calls, "How many operators ran behind the host, and how many it waited for.");
}

}  // namespace emulated_cuda
