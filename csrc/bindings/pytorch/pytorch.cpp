#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "csrc/bindings/bindings.h"
#include "csrc/pytorch/memory/counting_allocator.h"
#include "csrc/pytorch/model/paged_model.h"

namespace py = pybind11;

namespace hydra {

namespace {

using Released = py::call_guard<py::gil_scoped_release>;

std::shared_ptr<PagedModel> make_model(std::shared_ptr<DeviceBackend> backend, std::shared_ptr<HostArena> arena,
                                       Bytes budget, const std::optional<at::ScalarType>& face_dtype,
                                       const std::optional<at::ScalarType>& gradient_dtype, Bytes gradient_bound,
                                       bool poison_hosts, bool fault_path, const at::Device& device) {
  PagedModelOptions options;
  options.budget = budget;
  options.face_dtype = face_dtype;
  options.gradient_dtype = gradient_dtype;
  options.gradient_bound = gradient_bound;
  options.poison_hosts = poison_hosts;
  options.fault_path = fault_path;
  options.device = device;
  return std::make_shared<PagedModel>(std::move(backend), std::move(arena), options);
}

using ModelClass = py::class_<PagedModel, std::shared_ptr<PagedModel>>;

void bind_running(ModelClass& model_class) {
  model_class
      .def(py::init(&make_model), py::kw_only(), py::arg("backend"), py::arg("arena"), py::arg("budget"),
           py::arg("face_dtype") = std::nullopt, py::arg("gradient_dtype") = std::nullopt,
           py::arg("gradient_bound") = 0, py::arg("poison_hosts") = false, py::arg("fault_path") = true,
           py::arg("device") = at::Device(at::kCPU))
      .def("add_block", &PagedModel::add_block, py::arg("name"), py::arg("parameters"))
      .def("charge_buffers", &PagedModel::charge_buffers, py::arg("bytes"))
      .def("faces", &PagedModel::faces)
      .def(
          "show_in_window",
          [](PagedModel& model, py::object host, py::object face) {
            model.window().add(std::move(host), std::move(face));
          },
          py::arg("host"), py::arg("face"))
      .def(
          "watch",
          [](PagedModel& model, py::dict dictionary, std::string name) {
            model.window().watch(std::move(dictionary), std::move(name));
          },
          py::arg("dictionary"), py::arg("name"))
      .def("enter", &PagedModel::enter, py::arg("token"), py::arg("kind"))
      .def("exit", &PagedModel::exit, py::arg("token"), py::kw_only(), py::arg("failed"))
      .def("begin_visit", &PagedModel::begin_visit, py::arg("visit"), py::arg("blocks"), py::arg("kind"))
      .def("end_visit", &PagedModel::end_visit, py::arg("visit"), py::kw_only(), py::arg("failed"))
      .def("returns", py::overload_cast<WindowToken&, const std::vector<at::Tensor>&>(&PagedModel::returns),
           py::arg("token"), py::arg("outputs"))
      .def("returns", py::overload_cast<SiteVisit&, const std::vector<at::Tensor>&>(&PagedModel::returns),
           py::arg("visit"), py::arg("outputs"))
      .def(
          "wait_for_others",
          [](PagedModel& model, std::int64_t milliseconds) {
            return model.window().wait_for_others(std::chrono::milliseconds(milliseconds));
          },
          py::arg("milliseconds"), "False when other threads are still inside after that time.")
      .def(
          "recorded", [](PagedModel& model, PassKind kind) { return model.pager().recorded(kind); }, py::arg("kind"),
          Released(), "What the last pass of a kind ran: blocks, and the bytes activations took while each was in use.")
      .def("record_timeline", &PagedModel::record_timeline, py::arg("samples"))
      .def("timeline", &PagedModel::timeline)
      .def("refresh", &PagedModel::refresh)
      .def("expect_version", &PagedModel::expect_version, py::arg("version"))
      .def("note_optimizer_step", &PagedModel::note_optimizer_step)
      .def("defer_update", &PagedModel::defer_update, py::arg("updates"), py::arg("pool"), py::arg("scale") = 1.0F,
           Released())
      .def("finish_update", py::overload_cast<>(&PagedModel::finish_update), Released())
      .def("overlapping_blocks", &PagedModel::overlapping_blocks, Released(), py::arg("others"),
           "Groups of blocks whose parameters overlap in memory; -1 stands for parameters outside the model.")
      .def("stay_in", &PagedModel::stay_in, Released(), py::arg("blocks"), py::arg("kind"))
      .def("drop_copies", &PagedModel::drop_copies)
      .def("begin_early", &PagedModel::begin_early)
      .def("drop_early", &PagedModel::drop_early)
      .def("run_hooks", &PagedModel::run_hooks, Released())
      .def("close", &PagedModel::close);
}

void bind_reading(ModelClass& model_class) {
  model_class
      .def_property_readonly("pager_statistics", released([](PagedModel& model) { return model.pager().statistics(); }))
      .def_property_readonly(
          "leaving_norm", [](PagedModel& model) { return &model.sink().norm(); },
          py::return_value_policy::reference_internal)
      .def_property_readonly("gradient_statistics",
                             released([](PagedModel& model) { return model.sink().statistics(); }))
      .def_property_readonly("resident_blocks", released([](PagedModel& model) {
                               BlockList resident;
                               for (std::int32_t block = 0; block < static_cast<std::int32_t>(model.pager().blocks());
                                    ++block) {
                                 const BlockState state = model.pager().state(block);
                                 if (state == BlockState::kPresent || state == BlockState::kLoading) {
                                   resident.push_back(block);
                                 }
                               }
                               return resident;
                             }),
                             "Blocks whose bytes are on the device, or on their way there.")
      .def_property_readonly("resident_bytes",
                             released([](PagedModel& model) { return model.pager().resident_bytes(); }))
      .def_property_readonly("pins", released([](PagedModel& model) { return model.pager().pins(); }))
      .def_property_readonly(
          "ledger", [](PagedModel& model) { return &model.account().ledger(); },
          py::return_value_policy::reference_internal)
      .def_property_readonly("windows_opened", [](PagedModel& model) { return model.window().opens(); })
      .def_property_readonly("foreign_entries", [](PagedModel& model) { return model.window().foreign_entries(); })
      .def_property_readonly("window_open", &PagedModel::window_open)
      .def_property_readonly(
          "backend", [](PagedModel& model) { return &model.backend(); }, py::return_value_policy::reference_internal)
      .def_property_readonly("arena_bytes", [](PagedModel& model) { return model.arena().mapped_bytes(); })
      .def_property_readonly("deferred_updates", released(&PagedModel::deferred_updates))
      .def_property_readonly("update_seconds", released(&PagedModel::update_seconds))
      .def_property_readonly("update_wait_seconds", released(&PagedModel::update_wait_seconds))
      .def_property_readonly("update_bytes", released(&PagedModel::update_bytes))
      .def_property_readonly("dropped_copies", &PagedModel::dropped_copies)
      .def_property_readonly("foreign_bytes", &PagedModel::foreign_bytes)
      .def_property_readonly(
          "slot_bytes_held", [](PagedModel& model) { return model.slot_statistics().live_bytes; },
          "Bytes that the device has given to slots and has not got back.");
}

}  // namespace

void bind_pytorch(py::module_& module) {
  ModelClass model_class(module, "PagedModel");
  bind_running(model_class);
  // A context manager made of C: no interrupt can come between entering and the `with` that will leave.
  py::class_<Windows>(module, "Windows", "The windows of several models, entered and left together.")
      .def(py::init<std::vector<std::shared_ptr<PagedModel>>, PassKind>(), py::arg("models"), py::arg("kind"))
      .def("__enter__", &Windows::enter)
      .def("__exit__", [](Windows& windows, const py::object& type, const py::object&, const py::object&) {
        windows.exit(!type.is_none());
      });
  bind_reading(model_class);
  bind_gradients(module, model_class);
}

}  // namespace hydra
