// The kernels of the emulated device: every operator without one of its own runs the CPU's kernel on the stream.
//
// This is a fallback of the dispatch key CUDA. It also replaces the composite kernels of operators that are one kernel
// on a GPU: convolutions, normalizations, and operators on lists of tensors. Thread-safe.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace emulated_cuda {

void run_on_stream(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace emulated_cuda
