// Results and work of an operator under the virtual clock, from a run on tensors without bytes. Thread-safe.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

#include "emulator/torch/invocation.h"
#include "emulator/torch/result_shapes.h"

namespace emulated_cuda {

/// Of an invocation that has run on meta. `written` are operands. No result's shape depends on data, or this throws.
CallShapes shapes_of(const Invocation& invocation, const OperatorTraits& traits, const std::vector<int>& written);
/// Whether a result is new memory.
bool makes_tensor(const CallShapes& shapes);
/// Products of matrices, and attention, are counted in operations; all else in the bytes of operands and results.
KernelWork work_of(const c10::OperatorHandle& op, const Invocation& invocation, const OperatorTraits& traits);

}  // namespace emulated_cuda
