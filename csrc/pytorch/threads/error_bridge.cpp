#include "csrc/pytorch/threads/error_bridge.h"

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include "csrc/base/errors.h"
#include "csrc/memory/out_of_memory.h"

namespace py = pybind11;

namespace hydra {

namespace {

[[noreturn]] void raise_python(const char* type, const char* message) {
  const py::gil_scoped_acquire gil;
  PyErr_SetString(py::module_::import("hydra_ext.errors").attr(type).ptr(), message);
  python_error error;
  error.persist();
  throw std::move(error);
}

}  // namespace

void rethrow_for_torch(const std::string& explanation) {
  try {
    throw;
  } catch (const OutOfMemory& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, kOutOfMemory, error.what(), ". ", explanation);
  } catch (const TransferError& error) {
    raise_python("TransferError", error.what());
  } catch (const PageFaultError& error) {
    raise_python("PageFaultError", error.what());
  } catch (const ModelChanged& error) {
    raise_python("ModelChanged", error.what());
  } catch (const StateError& error) {
    raise_python("StateError", error.what());
  }
}

}  // namespace hydra
