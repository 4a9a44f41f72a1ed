// Operators that compute no numbers, or only move them: they have kernels of their own, which never wait for a shape.

#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "emulator/torch/copies.h"
#include "emulator/torch/operands.h"
#include "emulator/torch/storages.h"
#include "emulator/torch/stream_work.h"

namespace emulated_cuda {

namespace {

using OptionalType = std::optional<at::ScalarType>;
using OptionalLayout = std::optional<at::Layout>;
using OptionalDevice = std::optional<at::Device>;
using OptionalBool = std::optional<bool>;
using OptionalFormat = std::optional<at::MemoryFormat>;

// ---- new tensors ----------------------------------------------------------------------------------------------------

c10::DeviceIndex index_of(OptionalDevice device) {
  at::globalContext().lazyInitDevice(c10::kCUDA);
  const c10::Device given = device.value_or(c10::Device(c10::kCUDA));
  TORCH_INTERNAL_ASSERT(given.is_cuda());
  return given.has_index() ? given.index() : c10::cuda::current_device();
}

void expect_plain(OptionalLayout layout, OptionalBool pinned) {
  TORCH_CHECK_NOT_IMPLEMENTED(layout.value_or(at::kStrided) == at::kStrided,
                              "the emulated device has dense tensors only");
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
}

/// What torch does under deterministic algorithms: a kernel on the current stream, which other streams have to wait
/// for.
at::Tensor filled_if_deterministic(at::Tensor tensor) {
  const at::Context& context = at::globalContext();
  if (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory()) {
    at::native::fill_empty_deterministic_(tensor);
  }
  return tensor;
}

at::Tensor empty(at::IntArrayRef sizes, OptionalType dtype, OptionalLayout layout, OptionalDevice device,
                 OptionalBool pinned, OptionalFormat format) {
  expect_plain(layout, pinned);
  return filled_if_deterministic(empty_on_device(sizes, c10::dtype_or_default(dtype), index_of(device), format));
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, OptionalType dtype, OptionalLayout layout,
                         OptionalDevice device, OptionalBool pinned) {
  expect_plain(layout, pinned);
  return filled_if_deterministic(
      empty_strided_on_device(sizes, strides, c10::dtype_or_default(dtype), index_of(device)));
}

/// Zeros without memory, which autograd's formulas make.
at::Tensor efficient_zeros(at::IntArrayRef sizes, OptionalType dtype, OptionalLayout layout, OptionalDevice device,
                           OptionalBool pinned) {
  expect_plain(layout, pinned);
  static const auto allocators = [] {
    std::vector<std::unique_ptr<at::native::ZeroTensorAllocator>> made;
    for (int index = 0; index < c10::cuda::device_count(); ++index) {
      made.push_back(std::make_unique<at::native::ZeroTensorAllocator>(
          c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index))));
    }
    return made;
  }();
  const c10::DispatchKeySet keys{c10::DispatchKey::CUDA, c10::DispatchKey::ZeroTensor};
  return at::Tensor(at::detail::empty_generic(sizes, allocators.at(static_cast<std::size_t>(index_of(device))).get(),
                                              keys, c10::dtype_or_default(dtype), std::nullopt));
}

// ---- sizes and storages ---------------------------------------------------------------------------------------------

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, OptionalFormat format) {
  resize_tensor(self, sizes, at::OptionalIntArrayRef());
  if (format) {
    TORCH_CHECK(*format != at::MemoryFormat::Preserve, "Unsupported memory format", *format);
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, std::int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  at::native::checkSetStorage(self, std::move(source), offset, sizes, strides);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  resize_tensor(self, sizes, strides.data() != nullptr ? at::OptionalIntArrayRef(strides) : at::OptionalIntArrayRef());
  return self;
}

at::Tensor& set_empty(at::Tensor& self) {
  const at::Storage nothing(at::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, self.device()),
                            c10::cuda::CUDACachingAllocator::get(), true);
  return set_storage(self, nothing, 0, {0}, {});
}

void record_stream(at::Tensor& self, at::Stream stream) {
  c10::cuda::CUDACachingAllocator::recordStream(self.storage().data_ptr(), c10::cuda::CUDAStream(stream));
}

// ---- copies ---------------------------------------------------------------------------------------------------------

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  copy_tensor(self, source, non_blocking);
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  copy_tensor(target, self, non_blocking);
  return target;
}

// ---- fills ----------------------------------------------------------------------------------------------------------

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  at::empty({}, self.options().device(at::kCPU)).fill_(value);  // a value that does not fit is an error of the call
  Operands operands;
  operands.add(self);
  enqueue(self.device().index(), [operands = std::move(operands), value] { operands.open().front().fill_(value); },
          {.bytes = static_cast<double>(self.nbytes())});
  return self;
}

at::Tensor& zero(at::Tensor& self) { return fill(self, 0); }

// ---- choices --------------------------------------------------------------------------------------------------------

bool use_no_library(const at::Tensor&, const at::Tensor&, at::IntArrayRef, at::IntArrayRef, std::int64_t) {
  return false;
}

bool use_no_library_for_tensors(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                std::int64_t) {
  return false;
}

/// Attention is made of other operators: there is no fused kernel. Under the virtual clock, which needs none, flash
/// attention is chosen wherever a card has it.
std::int64_t attention_choice(const at::Tensor& query, const at::Tensor&, const at::Tensor&,
                              const std::optional<at::Tensor>& mask, double, bool, std::optional<double>, bool) {
  const bool fused = clock_runs() && !mask && query.itemsize() == 2;
  return static_cast<std::int64_t>(fused ? at::SDPBackend::flash_attention : at::SDPBackend::math);
}

const at::native::RegisterCUDADispatch<decltype(at::native::_fused_sdp_choice_stub)> kRegisteredChoice(
    at::native::_fused_sdp_choice_stub, &attention_choice);

}  // namespace

}  // namespace emulated_cuda

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(emulated_cuda::empty));
  m.impl("empty_strided", TORCH_FN(emulated_cuda::empty_strided));
  m.impl("_efficientzerotensor", TORCH_FN(emulated_cuda::efficient_zeros));
  m.impl("resize_", TORCH_FN(emulated_cuda::resize));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(emulated_cuda::set_storage));
  m.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("set_", TORCH_FN(emulated_cuda::set_empty));
  m.impl("is_set_to", TORCH_FN(at::native::is_set_to));
  m.impl("record_stream", TORCH_FN(emulated_cuda::record_stream));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("copy_", TORCH_FN(emulated_cuda::copy));
  m.impl("_copy_from", TORCH_FN(emulated_cuda::copy_from));
  m.impl("_local_scalar_dense", TORCH_FN(emulated_cuda::read_scalar));
  m.impl("fill_.Scalar", TORCH_FN(emulated_cuda::fill));
  m.impl("zero_", TORCH_FN(emulated_cuda::zero));
  m.impl("_fused_sdp_choice", TORCH_FN(emulated_cuda::attention_choice));
  m.impl("_use_cudnn_ctc_loss", TORCH_FN(emulated_cuda::use_no_library));
  m.impl("_use_cudnn_ctc_loss.Tensor", TORCH_FN(emulated_cuda::use_no_library_for_tensors));
  m.impl("_use_miopen_ctc_loss", TORCH_FN(emulated_cuda::use_no_library));
  m.impl("_use_miopen_ctc_loss.Tensor", TORCH_FN(emulated_cuda::use_no_library_for_tensors));
}
