// Bindings of csrc/base. Each error type of the core becomes the type of the same name in hydra_ext.errors.
#include <c10/util/Exception.h>

#include <pybind11/stl.h>

#include "csrc/base/activity.h"
#include "csrc/base/errors.h"
#include "csrc/bindings/bindings.h"
#include "csrc/memory/out_of_memory.h"

namespace py = pybind11;

namespace hydra {

namespace {

void raise(const char* module, const char* type, const char* message) {
  PyErr_SetString(py::module_::import(module).attr(type).ptr(), message);
}

void translate(std::exception_ptr error) {
  try {
    if (error) {
      std::rethrow_exception(error);
    }
  } catch (const OutOfMemory& known) {
    raise("torch", "OutOfMemoryError", (std::string(kOutOfMemory) + known.what()).c_str());
  } catch (const c10::OutOfMemoryError& known) {
    raise("torch", "OutOfMemoryError", known.what_without_backtrace());
  } catch (const TransferError& known) {
    raise("hydra_ext.errors", "TransferError", known.what());
  } catch (const SpillError& known) {
    raise("hydra_ext.errors", "SpillError", known.what());
  } catch (const PageFaultError& known) {
    raise("hydra_ext.errors", "PageFaultError", known.what());
  } catch (const ModelChanged& known) {
    raise("hydra_ext.errors", "ModelChanged", known.what());
  } catch (const InvalidSchedule& known) {
    raise("hydra_ext.errors", "InvalidSchedule", known.what());
  } catch (const InvalidBound& known) {
    raise("hydra_ext.errors", "InvalidBound", known.what());
  } catch (const DamagedStream& known) {
    raise("hydra_ext.errors", "DamagedStream", known.what());
  } catch (const StateError& known) {
    raise("hydra_ext.errors", "StateError", known.what());
  } catch (const c10::Error& known) {
    raise("builtins", "RuntimeError", known.what_without_backtrace());
  }
}

std::int64_t nanoseconds(Activity::Time time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

void bind_activity(py::module_& module) {
  py::enum_<PassKind>(module, "PassKind")
      .value("FORWARD", PassKind::kForward)
      .value("BACKWARD", PassKind::kBackward)
      .value("INFERENCE", PassKind::kInference);
  py::enum_<ActivityRow>(module, "ActivityRow")
      .value("COMPUTE", ActivityRow::kCompute)
      .value("TO_DEVICE", ActivityRow::kToDevice)
      .value("TO_HOST", ActivityRow::kToHost)
      .value("OPTIMIZER", ActivityRow::kOptimizer);
  py::enum_<ActivityKind>(module, "ActivityKind")
      .value("PASS", ActivityKind::kPass)
      .value("BLOCK", ActivityKind::kBlock)
      .value("COPY", ActivityKind::kCopy)
      .value("HOST_WORK", ActivityKind::kHostWork)
      .value("UPDATE", ActivityKind::kUpdate)
      .value("WAIT_FOR_WEIGHTS", ActivityKind::kWaitForWeights)
      .value("WAIT_FOR_FAULT", ActivityKind::kWaitForFault)
      .value("WAIT_FOR_ROOM", ActivityKind::kWaitForRoom)
      .value("WAIT_FOR_GRADIENTS", ActivityKind::kWaitForGradients)
      .value("WAIT_FOR_TRANSFERS", ActivityKind::kWaitForTransfers)
      .value("WAIT_FOR_UPDATE", ActivityKind::kWaitForUpdate);
  py::class_<Activity>(module, "Activity", "Times are those of time.monotonic_ns().")
      .def_readonly("row", &Activity::row)
      .def_readonly("kind", &Activity::kind)
      .def_readonly("continued", &Activity::continued)
      .def_readonly("bytes", &Activity::bytes)
      .def_readonly("thread", &Activity::thread)
      .def_property_readonly("block", [](const Activity& activity) { return activity.label.block; })
      .def_property_readonly("part", [](const Activity& activity) { return activity.label.part; })
      .def_property_readonly("pass_kind", [](const Activity& activity) { return activity.pass.kind; })
      .def_property_readonly("pass_number", [](const Activity& activity) { return activity.pass.number; })
      .def_property_readonly("begin", [](const Activity& activity) { return nanoseconds(activity.begin); })
      .def_property_readonly("end", [](const Activity& activity) { return nanoseconds(activity.end); });
  py::class_<MemoryMoment>(module, "MemoryMoment", "Device bytes in use, in the order of MemoryClass.")
      .def_property_readonly("time", [](const MemoryMoment& moment) { return nanoseconds(moment.time); })
      .def_readonly("bytes", &MemoryMoment::bytes);
  py::class_<ActivityRecord>(module, "ActivityRecord")
      .def_readonly("activities", &ActivityRecord::activities)
      .def_readonly("memory", &ActivityRecord::memory)
      .def_readonly("dropped", &ActivityRecord::dropped)
      .def_property_readonly("begin", [](const ActivityRecord& record) { return nanoseconds(record.begin); })
      .def_property_readonly("end", [](const ActivityRecord& record) { return nanoseconds(record.end); });
  py::class_<ActivityLog>(module, "ActivityLog", "Records what lanes, compute threads and optimizer threads did.")
      .def("start", &ActivityLog::start, py::arg("room"))
      .def("stop", &ActivityLog::stop)
      .def_property_readonly("recording", &ActivityLog::recording);
}

}  // namespace

void bind_base(py::module_& module) {
  py::register_local_exception_translator(&translate);  // errors of other modules keep their types
  module.def("human_bytes", &human_bytes, py::arg("bytes"), "Formats bytes for messages, with a binary unit.");
  module.attr("PAGE_ALIGNMENT") = kPageAlignment;
  bind_activity(module);
}

}  // namespace hydra
