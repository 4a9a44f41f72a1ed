// What a stash hands to autograd in place of a tensor: all of it but its bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "csrc/pytorch/stash/stashed_interval.h"

namespace hydra {

/// The multiple that torch's memory begins at, and that kernels choose their way by what is left over of.
Bytes memory_alignment(c10::Device device) noexcept;

class SavedTensor {
 public:
  explicit SavedTensor(const at::Tensor& tensor);

  VersionMark mark() const noexcept;
  /// Throws c10::Error, as torch does, if the tensor was written to since.
  void expect_unchanged() const;
  /// Over device memory that has the interval from `begin` on.
  at::Tensor over(const c10::Storage& storage, Bytes begin) const;

 private:
  friend class Stash;
  at::Tensor kept_;  // if it was not moved
  StashedIntervalPtr interval_;
  bool taken_ = false;  // in some backward

  c10::VariableVersion counter_;
  std::uint32_t version_ = 0;
  at::DimVector sizes_;
  at::DimVector strides_;
  Bytes offset_ = 0;  // in the interval
  caffe2::TypeMeta dtype_;
  c10::Device device_;
};

using SavedTensorPtr = std::shared_ptr<SavedTensor>;

}  // namespace hydra
