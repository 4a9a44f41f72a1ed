// Bare tensors: their storages have no bytes, which are elsewhere, and get them again later.
//
// Tensor, storage, version and aliases stay what they are. Unlike a withheld tensor, a bare one has no fault key: its
// user sees to it that nothing reads it meanwhile.
// Threads: one at a time for a tensor.
#pragma once

#include <ATen/core/Tensor.h>

namespace hydra {

/// A contiguous host tensor with these sizes and this type, which is bare.
at::Tensor make_bare(const at::Tensor& like);
/// Frees the bytes of a contiguous host tensor. Something else that reads them would read freed memory: see is_alone().
void bare(const at::Tensor& tensor);
/// Gives a bare tensor memory again, whose contents are undefined. Throws what torch's allocator throws.
void give_memory(const at::Tensor& tensor);

}  // namespace hydra
