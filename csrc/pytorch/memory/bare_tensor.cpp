#include "csrc/pytorch/memory/bare_tensor.h"

#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>

namespace hydra {

at::Tensor make_bare(const at::Tensor& like) {
  at::Tensor tensor = at::empty({0}, at::TensorOptions().dtype(like.dtype()).device(at::kCPU));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(like.sizes());
  return tensor;
}

void bare(const at::Tensor& tensor) {
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, c10::Device(c10::kCPU)));
  storage->set_nbytes(0);
}

void give_memory(const at::Tensor& tensor) {
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  const std::size_t bytes = static_cast<std::size_t>(tensor.numel()) * tensor.itemsize();
  storage->set_data_ptr_noswap(c10::GetCPUAllocator()->allocate(bytes));
  storage->set_nbytes(bytes);
}

}  // namespace hydra
