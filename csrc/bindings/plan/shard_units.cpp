// Bindings of the scheduler of shard units. hydra_ext.plan is the public interface.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "csrc/bindings/bindings.h"
#include "csrc/plan/units/unit_simulation.h"

namespace py = pybind11;

namespace hydra {

namespace {

using UnitValues = std::tuple<double, std::uint64_t, double>;
using UnitJobValues = std::tuple<std::string, std::vector<UnitValues>, std::int64_t>;
using RunValues = std::tuple<std::size_t, std::int64_t, std::int64_t, double>;
using TurnValues = std::tuple<std::size_t, std::int64_t, double, double>;

UnitBatch make_batch(std::int64_t devices, const std::vector<UnitJobValues>& jobs, std::optional<double> link) {
  UnitBatch batch{devices, link, {}};
  for (const auto& [name, units, repeats] : jobs) {
    UnitJob& job = batch.jobs.emplace_back();
    job.name = name;
    job.repeats = repeats;
    for (const auto& [seconds, shard, bytes] : units) {
      job.units.push_back({seconds, shard, bytes});
    }
  }
  return batch;
}

std::vector<std::vector<RunValues>> run_values(const UnitSchedule& schedule) {
  std::vector<std::vector<RunValues>> devices;
  for (const std::vector<UnitRun>& runs : schedule.runs) {
    std::vector<RunValues>& values = devices.emplace_back();
    values.reserve(runs.size());
    for (const UnitRun& run : runs) {
      values.emplace_back(run.job, run.first, run.last, run.start);
    }
  }
  return devices;
}

void bind_scheduler(py::module_& module) {
  py::class_<UnitScheduler>(module, "UnitScheduler")
      .def(py::init([](std::int64_t devices, const std::vector<UnitJobValues>& jobs, std::optional<double> link,
                       UnitPolicy policy,
                       std::uint64_t seed) { return UnitScheduler(make_batch(devices, jobs, link), policy, seed); }),
           py::arg("devices"), py::arg("jobs"), py::kw_only(), py::arg("link"), py::arg("policy"), py::arg("seed"))
      .def(
          "next",
          [](UnitScheduler& scheduler, std::size_t device, double now) -> std::optional<TurnValues> {
            const std::optional<UnitTurn> turn = scheduler.next(device, now);
            return turn ? std::optional<TurnValues>({turn->job, turn->unit, turn->begin, turn->end}) : std::nullopt;
          },
          py::arg("device"), py::arg("now"), "Returns (job, unit, begin, end), or None if no unit is eligible.")
      .def("ahead", &UnitScheduler::ahead, py::arg("device"), py::arg("now"))
      .def("finished", &UnitScheduler::finished, py::arg("device"))
      .def("remaining", &UnitScheduler::remaining, py::arg("job"))
      .def_property_readonly("units_left", &UnitScheduler::units_left)
      .def_property_readonly("load_seconds", &UnitScheduler::load_seconds);
}

}  // namespace

void bind_shard_units(py::module_& module) {
  py::enum_<UnitPolicy>(module, "UnitPolicy")
      .value("LONGEST", UnitPolicy::kLongest)
      .value("LONGEST_RESIDENT", UnitPolicy::kLongestResident)
      .value("ROUND_ROBIN", UnitPolicy::kRoundRobin)
      .value("RANDOM", UnitPolicy::kRandom)
      .value("SHORTEST", UnitPolicy::kShortest);
  py::class_<UnitSchedule>(module, "UnitSchedule")
      .def_readonly("makespan", &UnitSchedule::makespan)
      .def_readonly("bound", &UnitSchedule::bound)
      .def_readonly("busy_seconds", &UnitSchedule::busy_seconds)
      .def_readonly("units", &UnitSchedule::units)
      .def_readonly("load_seconds", &UnitSchedule::load_seconds)
      .def_readonly("stalled_seconds", &UnitSchedule::stalled_seconds)
      .def_property_readonly("runs", &run_values, "Of each device: (job, first unit, last unit, start).");
  module.def(
      "simulate_units",
      [](std::int64_t devices, const std::vector<UnitJobValues>& jobs, std::optional<double> link, UnitPolicy policy,
         std::uint64_t seed) {
        const py::gil_scoped_release released;
        return simulate_units(make_batch(devices, jobs, link), policy, seed);
      },
      py::arg("devices"), py::arg("jobs"), py::kw_only(), py::arg("link"), py::arg("policy"), py::arg("seed"),
      "Jobs are (name, [(seconds, shard, bytes)], repeats), the link bytes per second or None.");
  bind_scheduler(module);
}

}  // namespace hydra
