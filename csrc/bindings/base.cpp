// Errors: every type of the core becomes the one of the same name in hydra_ext.errors.
#include <c10/util/Exception.h>

#include "csrc/base/errors.h"
#include "csrc/bindings/bindings.h"

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
    raise("torch", "OutOfMemoryError", known.what());
  } catch (const c10::OutOfMemoryError& known) {
    raise("torch", "OutOfMemoryError", known.what_without_backtrace());
  } catch (const TransferError& known) {
    raise("hydra_ext.errors", "TransferError", known.what());
  } catch (const PageFaultError& known) {
    raise("hydra_ext.errors", "PageFaultError", known.what());
  } catch (const ModelChanged& known) {
    raise("hydra_ext.errors", "ModelChanged", known.what());
  } catch (const StateError& known) {
    raise("hydra_ext.errors", "StateError", known.what());
  } catch (const c10::Error& known) {
    raise("builtins", "RuntimeError", known.what_without_backtrace());
  }
}

}  // namespace

void bind_base(py::module_& module) {
  py::register_exception_translator(&translate);
  module.def("human_bytes", &human_bytes, py::arg("bytes"), "Bytes for messages, with a binary unit.");
  module.attr("PAGE_ALIGNMENT") = kPageAlignment;
}

}  // namespace hydra
