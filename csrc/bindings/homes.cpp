#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "csrc/bindings/bindings.h"
#include "csrc/pytorch/paged_model.h"

namespace py = pybind11;

namespace hydra {

namespace {

using Released = py::call_guard<py::gil_scoped_release>;
using ModelClass = py::class_<PagedModel, std::shared_ptr<PagedModel>>;

}  // namespace

void bind_homes(py::module_& module) {
  py::class_<HomeStatistics>(module, "HomeStatistics")
      .def_readonly("settled", &HomeStatistics::settled)
      .def_readonly("returned", &HomeStatistics::returned)
      .def_readonly("moved_bytes", &HomeStatistics::moved_bytes);
  auto model_class = py::reinterpret_borrow<ModelClass>(module.attr("PagedModel"));
  model_class
      .def("settle", &PagedModel::settle, py::arg("block"), py::arg("state"), Released(),
           "The device becomes the block's home, if it can.")
      .def("bring_home", py::overload_cast<std::int32_t>(&PagedModel::bring_home), py::arg("block"), Released())
      .def("bring_home", py::overload_cast<>(&PagedModel::bring_home), Released())
      .def("update_at_home", &PagedModel::update_at_home, py::arg("update"), py::arg("pool"), py::arg("scale") = 1.0F,
           Released())
      .def_property_readonly("settled_blocks",
                             py::cpp_function([](PagedModel& model) { return model.homes().blocks(); }, Released()))
      .def_property_readonly(
          "home_statistics",
          py::cpp_function([](PagedModel& model) { return model.homes().statistics(); }, Released()));
  module.def("scale_gradient", &scale_gradient, py::arg("gradient"), py::arg("factor"), Released(),
             "In place, wherever the gradient's home is.");
}

}  // namespace hydra
