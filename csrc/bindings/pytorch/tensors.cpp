#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "csrc/bindings/bindings.h"
#include "csrc/pytorch/memory/bare_tensor.h"
#include "csrc/pytorch/memory/counting_allocator.h"
#include "csrc/pytorch/model/graph_marks.h"
#include "csrc/pytorch/model/paged_model.h"
#include "csrc/pytorch/parameters/face_writes.h"
#include "csrc/pytorch/parameters/fault_key.h"
#include "csrc/pytorch/parameters/withheld.h"
#include "csrc/pytorch/stash/saved_digest.h"

namespace py = pybind11;

namespace hydra {

namespace {

struct Faulting {
  bool excluded = false;
};

void bind_bare_tensors(py::module_& module) {
  module.def("make_bare", &make_bare, py::arg("like"), "A tensor of zero bytes with the sizes of another one.");
  module.def("bare", &bare, py::arg("tensor"), "Frees the tensor's bytes. It stays what it is otherwise.");
  module.def("give_memory", &give_memory, py::arg("tensor"), "Gives a tensor without bytes memory again.");
  module.def("is_alone", &is_alone, py::arg("tensor"), "Whether the tensor's bytes have no other owner.");
}

}  // namespace

void bind_tensors(py::module_& module) {
  bind_bare_tensors(module);
  module.def("why_not_pageable", &why_not_pageable, py::arg("parameter"),
             "Why the parameter cannot be offloaded; empty when it can.");
  module.def("reached_models", &reached_models, py::arg("roots"), py::arg("models"),
             "Those of the models that the graph behind the roots belongs to.");
  module.def("reached_leaves", &reached_leaves, py::arg("roots"), py::arg("leaves"),
             "Which of the leaves the graph behind the roots reaches.");
  module.def("other_leaves", &other_leaves, py::arg("roots"),
             "The leaves that the graph behind the roots reaches, without device parameters.");
  // Made of C: no interrupt arrives between entering and leaving.
  py::class_<Faulting>(module, "Faulting",
                       "Inside, operators bring device parameters that are away, also below __torch_dispatch__.")
      .def(py::init<>())
      .def("__enter__",
           [](Faulting& faulting) {
             faulting.excluded = c10::impl::tls_is_dispatch_key_excluded(kFaultKey);
             c10::impl::tls_set_dispatch_key_excluded(kFaultKey, false);
           })
      .def("__exit__", [](Faulting& faulting, const py::object&, const py::object&, const py::object&) {
        c10::impl::tls_set_dispatch_key_excluded(kFaultKey, faulting.excluded);
      });
  py::class_<FaceWrites>(module, "FaceWrites",
                         "What this thread writes to device parameters inside, to be undone afterwards.")
      .def(py::init<>())
      .def("__enter__", &FaceWrites::begin)
      .def("__exit__",
           [](FaceWrites& writes, const py::object&, const py::object&, const py::object&) { writes.end(); })
      .def("undo", &FaceWrites::undo, "Restores the parameters' numbers and versions.");
  module.def(
      "is_face", [](const at::Tensor& tensor) { return page_of(tensor) != nullptr; }, py::arg("tensor"),
      "Whether the tensor is a device parameter or a view of one.");
  module.def(
      "on_simulated_device",
      [](const at::Tensor& tensor) {
        return page_of(tensor) != nullptr || (tensor.has_storage() && is_charged(tensor.storage().data()));
      },
      py::arg("tensor"), "Whether the tensor's bytes are charged to a simulated device.");
  module.def(
      "suspend_charging", [] { exchange_thread_charge({}); },
      "Nothing the calling thread allocates is charged from here on, until it enters a window.");
  const py::call_guard<py::gil_scoped_release> released;
  py::class_<SavedDigest>(module, "SavedDigest", "What a call saved for backward, or gave, in a few bytes.")
      .def(py::init<const std::vector<at::Tensor>&>(), py::arg("parameters"))
      .def("fresh", &SavedDigest::fresh, "With the same parameters, and nothing added.")
      .def("add", &SavedDigest::add, py::arg("tensor"), released,
           "False, and nothing is added, if the tensor cannot be compared.")
      .def_property_readonly("count", &SavedDigest::count)
      .def("equals", &SavedDigest::equals, py::arg("other"), released, "Whether the same was added in the same order.");
  module.def("reduced_by_place", &reduced_by_place, py::arg("tensor"), released,
             "One number that depends on every number of the tensor and its place, as it is found on GPUs.");
}

}  // namespace hydra
