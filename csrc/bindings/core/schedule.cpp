#include <pybind11/stl.h>

#include "csrc/bindings/bindings.h"
#include "csrc/schedule/stream.h"
#include "csrc/schedule/text.h"

namespace py = pybind11;

namespace hydra {

using namespace schedule;  // NOLINT: the words of one folder

namespace {

/// Compares values; an object of another type is not equal.
template <typename Value>
bool equals(const Value& value, const py::object& other) {
  return py::isinstance<Value>(other) && value == other.cast<const Value&>();
}

void bind_actions(py::module_& module) {
  py::enum_<ActionKind>(module, "ActionKind")
      .value("FORWARD", ActionKind::kForward)
      .value("BACKWARD", ActionKind::kBackward)
      .value("REDUCE", ActionKind::kReduce)
      .value("BEGIN_UPDATE", ActionKind::kBeginUpdate)
      .value("UPDATE", ActionKind::kFinishUpdate)
      .value("SEND_ACTIVATION", ActionKind::kSendActivation)
      .value("RECEIVE_ACTIVATION", ActionKind::kReceiveActivation)
      .value("SEND_GRADIENT", ActionKind::kSendGradient)
      .value("RECEIVE_GRADIENT", ActionKind::kReceiveGradient);
  py::class_<Action>(module, "Action", "One entry of a schedule; immutable.")
      .def(py::init<ActionKind, int, std::int64_t, int>(), py::arg("kind"), py::kw_only(), py::arg("stage"),
           py::arg("batch"), py::arg("microbatch") = 0)
      .def_readonly("kind", &Action::kind)
      .def_readonly("stage", &Action::stage)
      .def_readonly("batch", &Action::batch,
                    "Counted from the start of training; in a body, from the step's first batch.")
      .def_readonly("microbatch", &Action::microbatch,
                    "0 for REDUCE, BEGIN_UPDATE and UPDATE, which concern a whole batch.")
      .def_property_readonly("token", &token, "Kind, stage and microbatch as a schedule's text has them.")
      .def("__eq__", &equals<Action>)
      .def("__hash__",
           [](const Action& action) {
             return py::hash(
                 py::make_tuple(static_cast<int>(action.kind), action.stage, action.batch, action.microbatch));
           })
      .def("__repr__", &in_words);
}

void bind_streams(py::module_& module) {
  py::class_<Stream>(module, "ScheduleStream", "One rank's actions, step after step, from the first batch on.")
      .def("next_batch", &Stream::next_batch, py::arg("microbatches"))
      .def("drain", &Stream::drain)
      .def("evaluation", &Stream::evaluation, py::arg("batch"), py::kw_only(), py::arg("microbatches"))
      .def_property_readonly("batches", &Stream::batches);
}

}  // namespace

void bind_schedule(py::module_& module) {
  bind_actions(module);
  bind_streams(module);
  py::class_<Schedule> schedule_class(module, "Schedule", "The actions of every rank in one step; immutable.");
  schedule_class.def_property_readonly("stages", &Schedule::stages)
      .def_property_readonly("ranks", &Schedule::ranks)
      .def_property_readonly("microbatches", &Schedule::microbatches)
      .def_property_readonly("rule", [](const Schedule& schedule) { return name(schedule.rule()); })
      .def_property_readonly("recipe",
                             [](const Schedule& schedule) {
                               return schedule.recipe() ? std::optional<std::string>(schedule.recipe()->name())
                                                        : std::nullopt;
                             })
      .def_property_readonly("flushes", &Schedule::flushes)
      .def_property_readonly("communicates", &Schedule::communicates)
      .def_property_readonly("text", &text)
      .def("body", &Schedule::body, py::arg("rank"))
      .def("rank_of", &Schedule::rank_of, py::arg("stage"))
      .def("stages_of", &Schedule::stages_of, py::arg("rank"))
      .def("version_of", &Schedule::version_of, py::arg("stage"), py::arg("batch"))
      .def("buffers", &Schedule::buffers, py::arg("stage"))
      .def(
          "stream",
          [](const Schedule& schedule, int rank, std::int64_t first_batch) {
            return Stream(schedule, rank, first_batch);
          },
          py::arg("rank"), py::kw_only(), py::arg("first_batch") = 0)
      .def("unroll", &unroll, py::arg("batches"))
      .def("with_communication", &written_out)
      .def("__eq__", &equals<Schedule>)
      .def("__hash__", [](const Schedule& schedule) { return py::hash(py::str(text(schedule))); });
  module.def(
      "make_schedule",
      [](const std::string& kind, int stages, int ranks, int microbatches, bool vertical_sync, int ahead) {
        return Schedule::make(Recipe::named(kind, stages, ranks, microbatches, vertical_sync, ahead));
      },
      py::arg("kind"), py::kw_only(), py::arg("stages"), py::arg("ranks"), py::arg("microbatches"),
      py::arg("vertical_sync"), py::arg("ahead"));
  module.def("parse_schedule", &parse, py::arg("text"));
  bind_simulation(module, schedule_class);
}

}  // namespace hydra
