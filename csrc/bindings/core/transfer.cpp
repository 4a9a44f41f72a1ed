#include "csrc/bindings/bindings.h"
#include "csrc/io/file_operations.h"
#include "csrc/transfer/shared_backend.h"
#include "csrc/transfer/simulated_device.h"

namespace py = pybind11;

namespace hydra {

void bind_transfer(py::module_& module) {
  py::class_<LaneStatistics>(module, "LaneStatistics")
      .def_readonly("bytes", &LaneStatistics::bytes)
      .def_readonly("jobs", &LaneStatistics::jobs)
      .def_readonly("failures", &LaneStatistics::failures)
      .def_readonly("busy_seconds", &LaneStatistics::busy_seconds);
  py::class_<FileOperations, std::shared_ptr<FileOperations>>(module, "FileOperations");
  py::class_<FaultInjector, std::shared_ptr<FaultInjector>>(module, "FaultInjector");
  py::class_<StallLog>(module, "StallLog", "Seconds in which a device's compute waited for lanes.")
      .def("start", &StallLog::start, "Turns the log on. It is empty then.")
      .def("stop", &StallLog::stop)
      .def_property_readonly("count", &StallLog::count)
      .def("seconds", &StallLog::seconds, py::arg("first"), py::arg("end"), py::call_guard<py::gil_scoped_release>(),
           "Of the stalls from one number up to and without another. Waits until the device has ended them.");
  py::class_<DeviceBackend, std::shared_ptr<DeviceBackend>>(module, "DeviceBackend")
      .def_property_readonly("name", &DeviceBackend::name)
      .def_property_readonly("activity", &DeviceBackend::activity, py::return_value_policy::reference_internal)
      .def_property_readonly("stalls", &DeviceBackend::stalls, py::return_value_policy::reference_internal,
                             "None if compute runs on the host's threads.")
      .def_property_readonly("to_device_statistics",
                             [](DeviceBackend& device) { return device.to_device().statistics(); })
      .def_property_readonly("to_host_statistics", [](DeviceBackend& device) { return device.to_host().statistics(); });
  py::class_<SimulatedDevice, DeviceBackend, std::shared_ptr<SimulatedDevice>>(module, "SimulatedDevice")
      .def(py::init([](double to_device_bytes_per_second, double to_host_bytes_per_second, double latency_seconds,
                       double host_memory_bytes_per_second, bool poison, bool asynchronous, double kernel_delay_seconds,
                       std::uint64_t seed, std::shared_ptr<FaultInjector> faults) {
             SimulatedDeviceOptions options;
             options.to_device_bytes_per_second = to_device_bytes_per_second;
             options.to_host_bytes_per_second = to_host_bytes_per_second;
             options.latency_seconds = latency_seconds;
             options.host_memory_bytes_per_second = host_memory_bytes_per_second;
             options.poison = poison;
             options.asynchronous = asynchronous;
             options.kernel_delay_seconds = kernel_delay_seconds;
             options.seed = seed;
             options.faults = std::move(faults);
             return std::make_shared<SimulatedDevice>(options);
           }),
           py::kw_only(), py::arg("to_device_bytes_per_second") = 0.0, py::arg("to_host_bytes_per_second") = 0.0,
           py::arg("latency_seconds") = 0.0, py::arg("host_memory_bytes_per_second") = 0.0, py::arg("poison") = true,
           py::arg("asynchronous") = false, py::arg("kernel_delay_seconds") = 0.001, py::arg("seed") = 0,
           py::arg("faults") = nullptr)
      .def("hazards", &SimulatedDevice::hazards, py::call_guard<py::gil_scoped_release>())
      .def("first_hazard", &SimulatedDevice::first_hazard, py::call_guard<py::gil_scoped_release>());
  py::class_<SharedBackend, DeviceBackend, std::shared_ptr<SharedBackend>>(
      module, "SharedBackend", "One of several runs' views of a device: its figures are those of this run.")
      .def(py::init<std::shared_ptr<DeviceBackend>>(), py::arg("device"));
}

}  // namespace hydra
