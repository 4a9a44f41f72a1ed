// The hooks on saved tensors: Stash.pack, Stash.unpack, and the object that goes from one to the other.
//
// Autograd calls them for each tensor that an operator saves, so they are made with Python's own interface: pybind11's
// dispatch, its conversions and its registry of instances would cost more than the stash itself. Errors become Python's
// as in all other bindings. Threads: any, with the interpreter lock.
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <utility>

#include "csrc/bindings/bindings.h"
#include "csrc/pytorch/stash/stash.h"

namespace py = pybind11;

namespace hydra {

namespace {

/// What autograd keeps. It refers to no Python object, so the garbage collector need not know it.
struct SavedTensorObject {
  PyObject_HEAD SavedTensor saved;
};

PyTypeObject* saved_tensor_type = nullptr;  // of the module, which is never unloaded

void deallocate(PyObject* object) {
  PyTypeObject* const type = Py_TYPE(object);
  std::destroy_at(&reinterpret_cast<SavedTensorObject*>(object)->saved);
  PyObject_Free(object);
  Py_DECREF(type);
}

PyObject* object_of(SavedTensor saved) {
  auto* const object = PyObject_New(SavedTensorObject, saved_tensor_type);
  if (object == nullptr) {
    throw py::error_already_set();
  }
  std::construct_at(&object->saved, std::move(saved));
  return reinterpret_cast<PyObject*>(object);
}

/// The method descriptor has checked that `self` is a Stash; its value is null if its constructor never ran.
Stash& stash_of(PyObject* self) {
  void* const value = reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder().value_ptr();
  if (value == nullptr) {
    throw py::type_error("this Stash was never constructed");
  }
  return *static_cast<Stash*>(value);
}

/// Calls `function`. Its errors become Python's.
template <class Function>
PyObject* guarded(const Function& function) {
  try {
    return function();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (...) {  // becomes the exception that other bindings raise for it
    py::detail::try_translate_exceptions();
  }
  return nullptr;
}

PyObject* pack(PyObject* self, PyObject* argument) {
  return guarded([&] {
    if (!THPVariable_Check(argument)) {
      throw py::type_error("pack(): tensor is not a torch.Tensor");
    }
    const at::Tensor tensor = THPVariable_Unpack(argument);
    return object_of(stash_of(self).pack(tensor));
  });
}

PyObject* unpack(PyObject* self, PyObject* argument) {
  return guarded([&] {
    if (Py_TYPE(argument) != saved_tensor_type) {
      throw py::type_error("unpack(): saved is not a SavedTensor");
    }
    return THPVariable_Wrap(stash_of(self).unpack(reinterpret_cast<SavedTensorObject*>(argument)->saved));
  });
}

PyMethodDef pack_method = {"pack", &pack, METH_O,
                           "pack(self: hydra_ext._C.Stash, tensor: torch.Tensor) -> hydra_ext._C.SavedTensor"};
PyMethodDef unpack_method = {"unpack", &unpack, METH_O,
                             "unpack(self: hydra_ext._C.Stash, saved: hydra_ext._C.SavedTensor) -> torch.Tensor"};

void add_method(py::handle type, PyMethodDef& method) {
  auto* const known = reinterpret_cast<PyTypeObject*>(type.ptr());
  type.attr(method.ml_name) = py::reinterpret_steal<py::object>(PyDescr_NewMethod(known, &method));
}

}  // namespace

void bind_saved_tensors(py::module_& module, py::class_<Stash, std::shared_ptr<Stash>>& stash_class) {
  static char doc[] = "What a stash hands to autograd.";
  static PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(&deallocate)}, {Py_tp_doc, doc}, {0, nullptr}};
  static PyType_Spec spec = {.name = "hydra_ext._C.SavedTensor",
                             .basicsize = sizeof(SavedTensorObject),
                             .itemsize = 0,
                             .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                             .slots = slots};
  auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
  if (!type) {
    throw py::error_already_set();
  }
  module.attr("SavedTensor") = type;
  saved_tensor_type = reinterpret_cast<PyTypeObject*>(type.release().ptr());
  add_method(stash_class, pack_method);
  add_method(stash_class, unpack_method);
}

}  // namespace hydra
