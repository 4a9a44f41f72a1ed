// Host memory of models that are open at the same time: parameters of two may have the same, by `.data = ...`.
//
// What one model's optimizer writes no version counter of another one's parameter shows.
//
// Owns nothing: models are told apart by address, and forgotten when they close. Threads: any.
#pragma once

#include <vector>

#include "csrc/pytorch/parameters/host_parameter.h"

namespace hydra::overlapping_memory {

/// What the model's parameters may have in common with other tensors; replaces what was noted before. Returns the same
/// of all other models.
std::vector<HostExtent> exchange(const void* model, std::vector<HostExtent> extents);
void forget(const void* model) noexcept;

}  // namespace hydra::overlapping_memory
