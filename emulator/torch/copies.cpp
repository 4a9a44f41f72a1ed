#include "emulator/torch/copies.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <utility>

#include "emulator/torch/operands.h"
#include "emulator/torch/stream_work.h"

namespace emulated_cuda {

namespace {

using c10::cuda::CUDAGuard;
using c10::cuda::CUDAStream;

/// Whether a copy of bytes does it.
bool same_layout(const at::Tensor& to, const at::Tensor& from) {
  return to.dtype() == from.dtype() && to.sizes() == from.sizes() && to.is_conj() == from.is_conj() &&
         to.is_neg() == from.is_neg() &&
         ((to.is_contiguous() && from.is_contiguous()) ||
          (to.strides() == from.strides() && to.is_non_overlapping_and_dense()));
}

std::size_t bytes_of(const at::Tensor& tensor) { return static_cast<std::size_t>(tensor.nbytes()); }

/// Makes `later` wait for what `earlier` has now.
void order(const CUDAStream& earlier, const CUDAStream& later) {
  c10::cuda::CUDAEvent reached;
  reached.record(earlier);
  reached.block(later);
}

void copy_here(const at::Tensor& to, const at::Tensor& from, const CUDAStream& stream) {
  if (same_layout(to, from)) {
    if (to.const_data_ptr() != from.const_data_ptr()) {
      C10_CUDA_CHECK(cudaMemcpyAsync(to.mutable_data_ptr(), from.const_data_ptr(), bytes_of(to),
                                     cudaMemcpyDeviceToDevice, stream));
    }
    return;
  }
  Operands operands;
  const int target = operands.add(to);
  const int source = operands.add(from);
  const auto run = [operands = std::move(operands), target, source] {
    const auto tensors = operands.open();
    tensors[static_cast<std::size_t>(target)].copy_(tensors[static_cast<std::size_t>(source)]);
  };
  enqueue(from.device().index(), run, {.bytes = static_cast<double>(to.nbytes() + from.nbytes())});
}

void copy_between_devices(const at::Tensor& to, const at::Tensor& from) {
  const CUDAGuard guard(from.device());
  const CUDAStream source = c10::cuda::getCurrentCUDAStream(from.device().index());
  const CUDAStream target = c10::cuda::getCurrentCUDAStream(to.device().index());
  const bool crosses = to.device() != from.device();
  if (crosses) {
    order(target, source);
  }
  copy_here(to, from, source);
  if (crosses) {
    order(source, target);
  }
}

/// Bytes of the same layout, between the host and a device.
void copy_host_bytes(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const at::Tensor& host = to.is_cuda() ? from : to;
  const at::Tensor& there = to.is_cuda() ? to : from;
  const CUDAGuard guard(there.device());
  const CUDAStream stream = c10::cuda::getCurrentCUDAStream(there.device().index());
  const cudaMemcpyKind kind = to.is_cuda() ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
  if (!non_blocking) {
    c10::cuda::memcpy_and_sync(to.mutable_data_ptr(), from.const_data_ptr(), static_cast<std::int64_t>(to.nbytes()),
                               kind, stream);
    return;
  }
  C10_CUDA_CHECK(cudaMemcpyAsync(to.mutable_data_ptr(), from.const_data_ptr(), bytes_of(to), kind, stream));
  const c10::DataPtr& memory = host.storage().data_ptr();
  at::getHostAllocator(c10::kCUDA)->record_event(memory.get(), memory.get_context(), stream.unwrap());
}

/// Types and layouts are changed on the host's side where they differ.
void copy_with_host(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (same_layout(to, from)) {
    copy_host_bytes(to, from, non_blocking);
    return;
  }
  const at::Tensor source = to.is_cuda() ? from.to(to.scalar_type()).contiguous() : from.contiguous();
  at::Tensor target = to;
  if (!to.is_contiguous() || to.dtype() != source.dtype()) {
    target = at::empty_like(to, to.options().dtype(source.dtype()), at::MemoryFormat::Contiguous);
  }
  target._set_conj(source.is_conj());
  target._set_neg(source.is_neg());
  copy_host_bytes(target, source, non_blocking);
  if (!target.is_same(to)) {
    to.copy_(target, non_blocking);
  }
}

}  // namespace

void copy_tensor(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (to.is_same(from)) {
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(to.layout() == at::kStrided && from.layout() == at::kStrided,
                              "the emulated device has dense tensors only");
  const at::Tensor source = from.expand(to.sizes());
  if (to.numel() == 0) {
    return;
  }
  if (to.is_cuda() && source.is_cuda()) {
    copy_between_devices(to, source);
  } else {
    copy_with_host(to, source, non_blocking);
  }
}

at::Scalar read_scalar(const at::Tensor& tensor) {
  const at::Tensor value = at::empty({}, tensor.options().device(at::kCPU));
  copy_host_bytes(value, tensor, false);
  return at::_local_scalar_dense(value);
}

}  // namespace emulated_cuda
