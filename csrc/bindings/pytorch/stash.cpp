#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "csrc/bindings/bindings.h"
#include "csrc/pytorch/stash/stash.h"
#include "csrc/pytorch/stash/treatment.h"

namespace py = pybind11;

namespace hydra {

namespace {

std::shared_ptr<Treatment> made(TreatmentKind kind, Staying staying = Staying::kWhileRoom,
                                std::shared_ptr<LayerBounds> bounds = nullptr) {
  return std::make_shared<Treatment>(Treatment{kind, std::move(bounds), staying});
}

std::map<std::string, std::pair<std::int64_t, Bytes>> exact(const Stash& stash) {
  std::map<std::string, std::pair<std::int64_t, Bytes>> found;
  for (const auto& [operation, counted] : stash.exact()) {
    found[operation] = {counted.intervals, counted.bytes};
  }
  return found;
}

void bind_treatments(py::module_& module) {
  py::class_<LayerFigures>(module, "LayerFigures")
      .def_readonly("weight", &LayerFigures::weight)
      .def_readonly("forwards", &LayerFigures::forwards)
      .def_readonly("samples", &LayerFigures::samples)
      .def_readonly("bound", &LayerFigures::bound)
      .def_readonly("saved_bytes", &LayerFigures::saved_bytes)
      .def_readonly("stored_bytes", &LayerFigures::stored_bytes)
      .def_property_readonly("relative_error", &LayerFigures::relative_error);
  py::class_<LayerBounds, std::shared_ptr<LayerBounds>>(module, "LayerBounds",
                                                        "How far off each layer's stored input may be.")
      .def(py::init<std::optional<double>, double, std::int64_t>(), py::kw_only(), py::arg("fixed"),
           py::arg("fraction"), py::arg("every"))
      .def("set_momentum", &LayerBounds::set_momentum, py::arg("weight"), py::arg("over_gradient"))
      .def("layers", &LayerBounds::layers);
  py::enum_<Staying>(module, "Staying", "How long tensors that may leave stay on the device.")
      .value("NEVER", Staying::kNever)
      .value("WHILE_ROOM", Staying::kWhileRoom)
      .value("LONGEST", Staying::kLongest);
  py::class_<Treatment, std::shared_ptr<Treatment>>(module, "Treatment", "What is to become of what a thread saves.")
      .def_static(
          "move", [](Staying staying) { return made(TreatmentKind::kMove, staying); }, py::kw_only(),
          py::arg_v("staying", Staying::kWhileRoom, "Staying.WHILE_ROOM"))
      .def_static("move_convolution_inputs", [] { return made(TreatmentKind::kMoveConvolutionInputs); })
      .def_static("keep", [] { return made(TreatmentKind::kKeep); })
      .def_static(
          "compress",
          [](std::shared_ptr<LayerBounds> bounds, Staying staying) {
            return made(TreatmentKind::kCompress, staying, std::move(bounds));
          },
          py::arg("bounds"), py::kw_only(), py::arg_v("staying", Staying::kWhileRoom, "Staying.WHILE_ROOM"));
}

void bind_copies(py::module_& module) {
  module.attr("STASH_LEAST_BYTES") = CopyStore::kLeastBytes;
  module.attr("STASH_WORKING_BYTES") = CopyStore::kWorkingBytes;
  py::class_<CopyStatistics>(module, "CopyStatistics", "Copies off the device, in host memory and on the disk.")
      .def_readonly("host_bytes", &CopyStatistics::host_bytes)
      .def_readonly("peak_host_bytes", &CopyStatistics::peak_host_bytes)
      .def_readonly("disk_bytes", &CopyStatistics::disk_bytes)
      .def_readonly("written_bytes", &CopyStatistics::written_bytes)
      .def_readonly("read_bytes", &CopyStatistics::read_bytes)
      .def_readonly("writing_seconds", &CopyStatistics::writing_seconds)
      .def_readonly("reading_seconds", &CopyStatistics::reading_seconds);
}

void bind_scopes(py::module_& module) {
  py::class_<StashScope>(module, "StashScope",
                         "What the calling thread saves in a stash from begin() to end() is treated so, and counted "
                         "for that part.")
      .def(py::init([](const Stash& stash, std::shared_ptr<Treatment> treatment, std::int32_t part) {
             return StashScope(stash.identity(), std::move(treatment), part);
           }),
           py::arg("stash"), py::kw_only(), py::arg("treatment") = nullptr, py::arg("part") = kNoPart)
      .def("begin", &StashScope::begin)
      .def("end", &StashScope::end)
      .def(
          "set_treatment",
          [](StashScope& scope, std::shared_ptr<Treatment> treatment) { scope.set_treatment(std::move(treatment)); },
          py::arg("treatment") = nullptr,
          "Of calls that begin from now on. None continues that of the scope around it.");
}

}  // namespace

void bind_stash(py::module_& module) {
  py::class_<StashStatistics>(module, "StashStatistics")
      .def_readonly("tensors", &StashStatistics::tensors)
      .def_readonly("kept", &StashStatistics::kept)
      .def_readonly("intervals", &StashStatistics::intervals)
      .def_readonly("saved_bytes", &StashStatistics::saved_bytes)
      .def_readonly("encoded", &StashStatistics::encoded)
      .def_readonly("encoded_bytes", &StashStatistics::encoded_bytes)
      .def_readonly("stream_bytes", &StashStatistics::stream_bytes)
      .def_readonly("resident_bytes", &StashStatistics::resident_bytes)
      .def_readonly("to_host_bytes", &StashStatistics::to_host_bytes)
      .def_readonly("to_device_bytes", &StashStatistics::to_device_bytes)
      .def_readonly("prefetched", &StashStatistics::prefetched)
      .def_readonly("stayed", &StashStatistics::stayed)
      .def_readonly("wait_seconds", &StashStatistics::wait_seconds)
      .def_readonly("backward_wait_seconds", &StashStatistics::backward_wait_seconds)
      .def_readonly("held_bytes", &StashStatistics::held_bytes)
      .def_readonly("peak_held_bytes", &StashStatistics::peak_held_bytes)
      .def_readonly("host_bytes", &StashStatistics::host_bytes);
  py::class_<StashPass>(module, "StashPass", "From when nothing was saved until there was nothing again.")
      .def(py::init<>())
      .def_readonly("number", &StashPass::number)
      .def_readonly("saved_bytes", &StashPass::saved_bytes)
      .def_readonly("peak_bytes", &StashPass::peak_bytes);
  bind_copies(module);
  bind_treatments(module);
  py::class_<StashPart>(module, "StashPart", "What became of what a part of a model saved, in bytes.")
      .def_readonly("kept", &StashPart::kept)
      .def_readonly("stayed", &StashPart::stayed)
      .def_readonly("moved", &StashPart::moved)
      .def_readonly("encoded", &StashPart::encoded)
      .def_readonly("streams", &StashPart::streams);
  py::class_<Stash, std::shared_ptr<Stash>> stash_class(module, "Stash",
                                                        "Saved tensors, off the device until backward.");
  bind_saved_tensors(module, stash_class);
  stash_class
      .def(py::init<std::shared_ptr<DeviceBackend>, std::shared_ptr<HostArena>, at::Device, std::optional<Bytes>>(),
           py::kw_only(), py::arg("backend"), py::arg("arena"), py::arg("device"), py::arg("budget"))
      .def("set_budget", &Stash::set_budget, py::arg("budget"),
           "None: as much as transfers need. Intervals above the budget leave.")
      .def("limit_host", &Stash::limit_host, py::arg("bytes"), py::arg("folder"), py::arg("files") = nullptr,
           "Host bytes of copies, and the folder for the others. Called once, before the first is made.")
      .def("copies", &Stash::copies)
      .def("protect", &Stash::protect, py::arg("tensors"))
      .def("last_pass", &Stash::last_pass, "The last one that has ended.")
      .def("parts", &Stash::parts)
      .def("exact", &exact, "Intervals and bytes that were not encoded, by the operator that needs them exactly.")
      .def("close", &Stash::close)
      .def("statistics", &Stash::statistics, "Once the transfers under way have ended.");
  bind_scopes(module);
}

}  // namespace hydra
