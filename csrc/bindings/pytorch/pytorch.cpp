#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "csrc/bindings/bindings.h"
#include "csrc/pytorch/model/paged_model.h"

namespace py = pybind11;

namespace hydra {

namespace {

std::shared_ptr<PagedModel> make_model(std::shared_ptr<DeviceBackend> backend, std::shared_ptr<HostArena> arena,
                                       Bytes budget, const std::optional<at::ScalarType>& face_dtype,
                                       const std::optional<at::ScalarType>& gradient_dtype, Bytes gradient_bound,
                                       bool poison_hosts, bool fault_path, const at::Device& device,
                                       std::shared_ptr<Stash> stash) {
  PagedModelOptions options;
  options.budget = budget;
  options.face_dtype = face_dtype;
  options.gradient_dtype = gradient_dtype;
  options.gradient_bound = gradient_bound;
  options.poison_hosts = poison_hosts;
  options.fault_path = fault_path;
  options.device = device;
  options.stash = std::move(stash);
  return std::make_shared<PagedModel>(std::move(backend), std::move(arena), options);
}

}  // namespace

void bind_pytorch(py::module_& module) {
  py::class_<PagedModel, std::shared_ptr<PagedModel>> model_class(module, "PagedModel",
                                                                  "One model under one budget, by its parts.");
  // What a part says in its signatures has to be known before it.
  bind_model(module);
  bind_gradients(module);
  bind_homes(module);
  bind_windows(module);
  model_class
      .def(py::init(&make_model), py::kw_only(), py::arg("backend"), py::arg("arena"), py::arg("budget"),
           py::arg("face_dtype") = std::nullopt, py::arg("gradient_dtype") = std::nullopt,
           py::arg("gradient_bound") = 0, py::arg("poison_hosts") = false, py::arg("fault_path") = true,
           py::arg("device") = at::Device(at::kCPU), py::arg("stash") = nullptr)
      .def("add_block", &PagedModel::add_block, py::arg("name"), py::arg("parameters"))
      .def("close", &PagedModel::close)
      .def_property_readonly("gate", &PagedModel::gate)
      .def_property_readonly("memory", &PagedModel::memory)
      .def_property_readonly("blocks", &PagedModel::blocks)
      .def_property_readonly("pager", &PagedModel::pager)
      .def_property_readonly("homes", &PagedModel::homes)
      .def_property_readonly("gradients", &PagedModel::gradients)
      .def_property_readonly("update", &PagedModel::update)
      .def_property_readonly("changes", &PagedModel::changes)
      .def_property_readonly("moves", &PagedModel::moves)
      .def_property_readonly("arrivals", &PagedModel::arrivals)
      .def_property_readonly("rounds", &PagedModel::rounds)
      .def_property_readonly("window", &PagedModel::window);
}

}  // namespace hydra
