#include <array>
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

/// Seconds by the unit of the machine.
pybind11::dict dict_of(const std::array<double, kUnits>& seconds) {
  constexpr std::array names{"program", "processors", "to_device", "to_host", "host_memory"};
  pybind11::dict dict;
  for (std::size_t unit = 0; unit < names.size(); ++unit) {
    dict[names.at(unit)] = seconds.at(unit);
  }
  return dict;
}

pybind11::dict clock_report_as_dict() {
  const ClockReport report = clock_report();
  pybind11::dict dict;
  dict["seconds"] = report.seconds;
  dict["busy"] = dict_of(report.busy);
  dict["waited"] = dict_of(report.waited);
  return dict;
}

void bind_clock(pybind11::module_& module) {
  namespace py = pybind11;
  add(
      module, "start_clock",
      [](double half_flops, double full_flops, double device_memory, double to_device, double to_host,
         double host_memory, double operation_seconds, double launch_seconds, double call_seconds) {
        start_clock({half_flops, full_flops, device_memory, to_device, to_host, host_memory, operation_seconds,
                     launch_seconds, call_seconds});
      },
      py::kw_only(), py::arg("half_flops"), py::arg("full_flops"), py::arg("device_memory"), py::arg("to_device"),
      py::arg("to_host"), py::arg("host_memory"), py::arg("operation_seconds"), py::arg("launch_seconds"),
      py::arg("call_seconds"));
  add(module, "stop_clock", [] { stop_clock(); });
  add(module, "clock_runs", [] { return clock_runs(); });
  module.def("clock_report", torch::wrap_pybind_function(&clock_report_as_dict));
  add(module, "host_work_address", [] { return reinterpret_cast<std::uintptr_t>(&use_host_memory); });
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
  bind_clock(module);
}

}  // namespace emulated_cuda
