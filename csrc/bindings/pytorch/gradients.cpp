// What others may do with a model's gradients before they are the optimizer's.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "csrc/bindings/bindings.h"
#include "csrc/pytorch/memory/counting_allocator.h"
#include "csrc/pytorch/model/paged_model.h"

namespace py = pybind11;

namespace hydra {

namespace {

std::vector<std::optional<at::Tensor>> take_gathered(GradientPath& path, std::int32_t block) {
  const py::gil_scoped_release released;
  std::vector<std::optional<at::Tensor>> gradients;
  for (at::Tensor& gradient : path.take_gathered(block)) {
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

void bind_gradients(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> gil_released;
  py::class_<GradientPath>(module, "GradientPath", "The way of gradients to where they are at home.")
      .def("take_gathered", &take_gathered, py::arg("block"),
           "What was gathered on the device and is all there is of a block's gradients, or copies of what is at home "
           "there, by parameter.")
      .def("return_gathered", &GradientPath::return_gathered, gil_released, py::arg("block"), py::arg("index"),
           py::arg("gradient"))
      .def("finish", &GradientPath::finish, gil_released, py::arg("block"),
           "Nothing is to be added to the block's gradients in this window. Returns which of them have changed.")
      .def(
          "send_to_disk",
          [](GradientPath& path, std::int32_t block, Bytes backlog) { path.spill().begin(block, backlog); },
          py::arg("block"), py::arg("backlog"), gil_released)
      .def("begin_early", [](GradientPath& path) { path.gathering().begin_early(); })
      .def("drop_early", [](GradientPath& path) { path.gathering().drop_carried(); })
      .def(
          "run_hooks", [](GradientPath& path) { path.sink().run_hooks(/*failed=*/false); }, gil_released,
          "Runs the post-accumulate hooks of parameters that one microbatch's backward has brought gradients to.")
      .def_property_readonly("norm", [](GradientPath& path) { return &path.sink().norm(); })
      .def_property_readonly("statistics", released([](GradientPath& path) { return path.sink().statistics(); }));
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
