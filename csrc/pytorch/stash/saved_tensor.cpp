#include "csrc/pytorch/stash/saved_tensor.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/variable.h>

#include <cstring>

#include "csrc/base/types.h"

namespace hydra {

namespace autograd = torch::autograd;

namespace {

/// The tensor itself would own its graph, and the graph would own it. A leaf that requires a gradient has no graph. All
/// others are detached as torch detaches them when it saves an output, without the dispatcher.
at::Tensor without_graph(const at::Tensor& tensor) {
  if (tensor.is_leaf() && tensor.requires_grad()) {
    return tensor;
  }
  return tensor.is_inference() ? tensor.detach() : tensor.tensor_data();
}

}  // namespace

Bytes memory_alignment(c10::Device device) noexcept { return device.is_cuda() ? kPageAlignment : 64; }

std::optional<c10::Stream> compute_stream(c10::Device device) {
  return device.is_cuda() ? std::optional(c10::impl::VirtualGuardImpl(device.type()).getStream(device)) : std::nullopt;
}

SavedTensor::SavedTensor(const at::Tensor& tensor, Kind kind) : dtype_(tensor.dtype()), device_(tensor.device()) {
  if (!tensor.is_inference()) {
    counter_ = autograd::impl::version_counter(tensor);
    version_ = counter_.current_version();
  }
  if (kind == Kind::kKept) {
    kept_ = without_graph(tensor);
  } else {
    sizes_ = tensor.sizes();
    strides_ = tensor.strides();
  }
}

VersionMark SavedTensor::mark() const noexcept {
  // torch gives no access to a counter's identity, but the object is just a pointer.
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  VersionMark mark{nullptr, version_};
  std::memcpy(&mark.counter, &counter_, sizeof mark.counter);
  return mark;
}

void SavedTensor::expect_unchanged() const {
  if (!counter_.enabled()) {
    return;
  }
  const std::uint32_t now = counter_.current_version();
  TORCH_CHECK(
      now == version_,
      "one of the variables needed for gradient computation has been modified by an inplace operation: [",
      device_.is_cuda() ? "torch.cuda." : "torch.", c10::toString(c10::typeMetaToScalarType(dtype_)), "Tensor ",
      kept_.defined() ? kept_.sizes() : at::IntArrayRef(sizes_), "] is at version ", now, "; expected version ",
      version_,
      " instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
      "torch.autograd.set_detect_anomaly(True).");
}

at::Tensor SavedTensor::over(const c10::Storage& storage, Bytes begin) const {
  const auto backend = storage.device().is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  at::Tensor tensor =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(backend), dtype_);
  auto* const impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(sizes_, strides_, (begin + offset_) / static_cast<Bytes>(dtype_.itemsize()));
  impl->set_version_counter(counter_);
  return tensor;
}

}  // namespace hydra
