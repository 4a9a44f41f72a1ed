// A registry of the host memory of models that are open at the same time.
//
// Parameters of two models may have the same memory, by `.data = ...`. An optimizer's write to one model then bumps no
// version counter of the other.
//
// Owns no memory: models are identified by address, and forgotten when they close. Thread-safe.
#pragma once

#include <vector>

#include "csrc/pytorch/parameters/host_parameter.h"

namespace hydra::overlapping_memory {

/// Registers the memory that the model's parameters may share with other tensors, in place of what was registered
/// before. Returns the registered memory of all other models.
std::vector<HostExtent> exchange(const void* model, std::vector<HostExtent> extents);
void forget(const void* model) noexcept;

}  // namespace hydra::overlapping_memory
