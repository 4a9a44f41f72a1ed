// Digests of tensors on a GPU by a kernel of ours: operators of torch would move ninety bytes for one of bfloat16.
#include <ATen/ops/view_as_real.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>

#include "csrc/pytorch/cuda/cuda_place_sum.h"
#include "csrc/pytorch/stash/saved_digest.h"
#include "csrc/transfer/cuda/cuda_error.h"

namespace hydra {

namespace {

/// The tensor's dimensions in their order, merged as far as possible. Empty if they are too many.
std::optional<PlaceLayout> layout_of(const at::Tensor& tensor) {
  PlaceLayout layout;
  layout.dimensions = 1;
  layout.sizes[0] = 1;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    const auto last = static_cast<std::size_t>(layout.dimensions - 1);
    const std::int64_t size = tensor.size(i);
    if (size == 1) {
      continue;
    }
    if (layout.sizes[last] == 1 || layout.strides[last] == size * tensor.stride(i)) {
      layout.sizes[last] *= size;
      layout.strides[last] = tensor.stride(i);
    } else if (layout.dimensions == PlaceLayout::kMost) {
      return std::nullopt;
    } else {
      layout.sizes[last + 1] = size;
      layout.strides[last + 1] = tensor.stride(i);
      ++layout.dimensions;
    }
  }
  return layout;
}

bool add_on_cuda(const at::Tensor& tensor, const at::Tensor& sum) {
  if (!tensor.is_cuda() || tensor.is_conj() || tensor.is_neg()) {
    return false;
  }
  const at::Tensor items = tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  const std::optional<PlaceLayout> layout = layout_of(items);
  if (!layout) {
    return false;
  }
  const CudaDeviceGuard guard(tensor.device().index());
  HYDRA_CUDA(launch_place_sum(items.const_data_ptr(), static_cast<int>(items.itemsize()), *layout,
                              reinterpret_cast<unsigned long long*>(sum.mutable_data_ptr()),
                              c10::cuda::getCurrentCUDAStream(tensor.device().index()).stream()));
  return true;
}

}  // namespace

AddByPlace add_by_place_on_cuda() noexcept { return &add_on_cuda; }

}  // namespace hydra
