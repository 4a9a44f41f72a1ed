#include "emulator/python/bindings.h"

PYBIND11_MODULE(_machine, module) {
  module.doc() = "The emulated CUDA machine; torch is imported, and libemulated_cuda.so loaded, before this.";
  emulated_cuda::bind_machine(module);
  emulated_cuda::bind_device(module);
  emulated_cuda::bind_memory(module);
  module.def("add_collectives", [module]() mutable { emulated_cuda::bind_collectives(module); });
}
