// The parts of the module `_machine`. Each adds functions that raise torch's exceptions and release Python's lock.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace emulated_cuda {

template <class Function, class... Extra>
void add(pybind11::module_& module, const char* name, Function&& function, Extra&&... extra) {
  module.def(name, torch::wrap_pybind_function_no_gil(std::forward<Function>(function)), std::forward<Extra>(extra)...);
}

void bind_machine(pybind11::module_& module);  // control.h
void bind_device(pybind11::module_& module);   // what torch.cuda calls
void bind_memory(pybind11::module_& module);   // what torch.cuda.memory calls
/// ProcessGroupNCCL. Its base classes have to be there: torch._C._c10d_init() was called.
void bind_collectives(pybind11::module_& module);

}  // namespace emulated_cuda
