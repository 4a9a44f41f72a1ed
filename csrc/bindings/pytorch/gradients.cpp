// What others may do with a model's gradients before they are the optimizer's.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "csrc/bindings/bindings.h"
#include "csrc/pytorch/memory/counting_allocator.h"
#include "csrc/pytorch/model/paged_model.h"

namespace py = pybind11;

namespace hydra {

namespace {

using Released = py::call_guard<py::gil_scoped_release>;

std::vector<std::optional<at::Tensor>> take_gathered(PagedModel& model, std::int32_t block) {
  const py::gil_scoped_release released;
  std::vector<std::optional<at::Tensor>> gradients;
  for (at::Tensor& gradient : model.take_gathered(block)) {
    gradients.push_back(gradient.defined() ? std::optional(std::move(gradient)) : std::nullopt);
  }
  return gradients;
}

struct Uncharged {
  std::optional<HostScope> scope;
};

struct Charged {
  explicit Charged(Bytes limit) : account(std::make_shared<Account>(limit)) {}
  AccountPtr account;
  ThreadCharge before;
};

}  // namespace

void bind_gradients(py::module_& module, py::class_<PagedModel, std::shared_ptr<PagedModel>>& model_class) {
  model_class
      .def("take_gathered", &take_gathered, py::arg("block"),
           "What was gathered on the device and is all there is of a block's gradients, or copies of what is at home "
           "there, by parameter.")
      .def("settle_gradients", &PagedModel::settle_gradients, Released(), py::arg("block"),
           "Nothing is to be added to the block's gradients in this window. Returns which of them have changed.")
      .def("return_gathered", &PagedModel::return_gathered, Released(), py::arg("block"), py::arg("index"),
           py::arg("gradient"))
      .def("moved_hosts", &PagedModel::moved_hosts)
      .def_property_readonly("in_backward", &PagedModel::in_backward);
  // Made of C, as Windows is.
  py::class_<Uncharged>(module, "Uncharged", "What the thread allocates inside is charged to no device.")
      .def(py::init<>())
      .def("__enter__", [](Uncharged& uncharged) { uncharged.scope.emplace(); })
      .def("__exit__", [](Uncharged& uncharged, const py::object&, const py::object&, const py::object&) {
        uncharged.scope.reset();
      });
  py::class_<Charged>(module, "Charged", "What the thread allocates inside is charged to one simulated device.")
      .def(py::init<Bytes>(), py::arg("limit"))
      .def("__enter__", [](Charged& charged) { charged.before = exchange_thread_charge({.account = charged.account}); })
      .def("__exit__", [](Charged& charged, const py::object&, const py::object&,
                          const py::object&) { exchange_thread_charge(std::exchange(charged.before, {})); })
      .def_property_readonly(
          "ledger", [](Charged& charged) -> Ledger& { return charged.account->ledger(); },
          py::return_value_policy::reference_internal);
}

}  // namespace hydra
