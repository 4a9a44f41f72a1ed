// Parts of a paged model: its memory, its blocks, its pager, what is written to it, and the step under way.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/bindings/bindings.h"
#include "csrc/pytorch/model/paged_model.h"

namespace py = pybind11;

namespace hydra {

namespace {

BlockList resident_blocks(const Pager& pager) {
  BlockList resident;
  for (std::int32_t block = 0; block < static_cast<std::int32_t>(pager.blocks()); ++block) {
    const BlockState state = pager.state(block);
    if (state == BlockState::kPresent || state == BlockState::kLoading) {
      resident.push_back(block);
    }
  }
  return resident;
}

void bind_blocks(py::module_& module) {
  py::class_<ModelBlocks>(module, "ModelBlocks", "The blocks, and both faces of their parameters.")
      .def("faces", &ModelBlocks::faces)
      .def(
          "trained", [](const ModelBlocks& blocks) { return py::bytes(blocks.trained()); },
          "Whether each face requires a gradient: b'1' or b'0'.")
      .def(
          "set_trained", [](ModelBlocks& blocks, const py::bytes& trained) { blocks.set_trained(trained); },
          py::arg("trained"))
      .def("overlapping", &ModelBlocks::overlapping, py::call_guard<py::gil_scoped_release>(), py::arg("others"),
           "Groups of blocks whose parameters overlap in memory; -1 stands for parameters outside the model.")
      .def_property_readonly("foreign_bytes", &ModelBlocks::foreign_bytes);
}

}  // namespace

void bind_model(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> gil_released;
  py::class_<ModelMemory>(module, "ModelMemory", "The budget on the device, and the host arena.")
      .def("charge_buffers", &ModelMemory::charge_buffers, py::arg("bytes"))
      .def_property_readonly("ledger", &ModelMemory::ledger)
      .def_property_readonly("backend", &ModelMemory::backend)
      .def_property_readonly("arena_bytes", [](const ModelMemory& memory) { return memory.arena()->mapped_bytes(); })
      .def_property_readonly(
          "slack", [](const ModelMemory& memory) { return memory.meter().slack; },
          "The part of the budget that plans leave free for the device's allocator, in bytes.")
      .def_property_readonly("slot_bytes", &ModelMemory::slot_bytes,
                             "Bytes that the device has given to slots and has not got back.");
  bind_blocks(module);
  py::class_<Pager>(module, "Pager", "Which block is in which slot.")
      .def(
          "forget_activations", [](Pager& pager) { pager.passes().forget_activations(); }, gil_released,
          "What activations took so far is no measure of what they will take from now on.")
      .def(
          "recorded", [](Pager& pager, PassKind kind) { return pager.passes().recorded(kind); }, py::arg("kind"),
          gil_released,
          "What the last pass of a kind ran: blocks, and the bytes activations took while each was in use.")
      .def_property_readonly("statistics", released(&Pager::statistics))
      .def_property_readonly("resident_blocks", released(&resident_blocks),
                             "Blocks whose bytes are on the device, or on their way there.")
      .def_property_readonly("resident_bytes", released(&Pager::resident_bytes))
      .def_property_readonly("pins", released(&Pager::pins));
  py::class_<OverwrittenLog, std::shared_ptr<OverwrittenLog>>(
      module, "OverwrittenLog", "What a step overwrites in the parameters of one model while this exists.")
      .def(
          "take",
          [](OverwrittenLog& log) {
            std::vector<std::tuple<std::string, at::Tensor, at::Tensor>> found;
            for (Overwritten& each : log.take()) {
              found.emplace_back(std::move(each.name), std::move(each.host), std::move(each.before));
            }
            return found;
          },
          "Name, host parameter and earlier numbers of each one that was written to since the last call.")
      .def_property_readonly("is_elsewhere", &OverwrittenLog::is_elsewhere,
                             "Whether other threads have entered the model, and the step's have not.");
  py::class_<HostChanges>(module, "HostChanges", "What is written to parameters, on either side.")
      .def("refresh", &HostChanges::refresh)
      .def("note_optimizer_step", &HostChanges::note_optimizer_step)
      .def("log_overwritten", &HostChanges::log_overwritten, py::arg("is_own"), gil_released,
           "A log of what is overwritten in parameters from now on. is_own: whether the step trains this model.")
      .def("moved", &HostChanges::moved,
           "Names of parameters that were written to since the window opened, or last was open.");
  py::class_<PendingUpdate>(module, "PendingUpdate", "An optimizer step that runs while the model goes on.")
      .def("defer", &PendingUpdate::defer, py::arg("updates"), py::arg("pool"), py::arg("scale") = 1.0F, gil_released)
      .def("finish", py::overload_cast<>(&PendingUpdate::finish), gil_released)
      .def_property_readonly("deferred", released(&PendingUpdate::deferred), "Steps so far.")
      .def_property_readonly("seconds", released(&PendingUpdate::seconds))
      .def_property_readonly("wait_seconds", released(&PendingUpdate::wait_seconds))
      .def_property_readonly("bytes", released(&PendingUpdate::bytes));
}

}  // namespace hydra
