// The stand-in that a stash hands to autograd: it has everything of a tensor except its bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "csrc/pytorch/stash/stashed_interval.h"

namespace hydra {

/// The alignment of torch's memory on a device. Kernels choose their algorithm by the remainder of an address to it.
Bytes memory_alignment(c10::Device device) noexcept;
/// The calling thread's current stream on a GPU; null on the CPU.
std::optional<c10::Stream> compute_stream(c10::Device device);

class SavedTensor {
 public:
  enum class Kind : std::uint8_t { kKept, kInInterval };
  SavedTensor(const at::Tensor& tensor, Kind kind);

  VersionMark mark() const noexcept;
  /// Throws c10::Error, as torch does, if the tensor was written to since it was saved.
  void expect_unchanged() const;
  /// Makes the tensor in device memory that has the interval from `begin` on.
  at::Tensor over(const c10::Storage& storage, Bytes begin) const;

 private:
  friend class Stash;
  at::Tensor kept_;  // the tensor itself, without its graph; undefined if the interval has its bytes
  StashedIntervalPtr interval_;
  bool taken_ = false;  // whether a backward has read it

  c10::VariableVersion counter_;
  std::uint32_t version_ = 0;
  // Of a tensor in an interval:
  at::DimVector sizes_;
  at::DimVector strides_;
  Bytes offset_ = 0;  // in the interval
  caffe2::TypeMeta dtype_;
  c10::Device device_;
};

}  // namespace hydra
