// What a call saved for backward, or gave, in a few bytes: two calls are the same if theirs are.
//
// Of each tensor, in order: its dtype, sizes, strides and numbers, every one at its place. Of parameters, and of their
// views, which one it is in place of the numbers: those of two parameters may be equal today. Numbers on a GPU are
// reduced there, and come to the host when two are compared.
// Ownership: keeps the parameters' storages, so that no other takes their place. Threads: one at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "csrc/base/digest.h"

namespace hydra {

class SavedDigest {
 public:
  explicit SavedDigest(const std::vector<at::Tensor>& parameters);
  /// With the same parameters, and nothing added.
  [[nodiscard]] SavedDigest fresh() const;
  /// False, and nothing is added, if the tensor cannot be compared: sparse, nested, quantised, of a class of its own,
  /// or one row of bytes, which may be a library's notes.
  bool add(const at::Tensor& tensor);
  [[nodiscard]] std::size_t count() const noexcept { return count_; }
  [[nodiscard]] bool equals(const SavedDigest& other) const;

 private:
  struct Parameters {
    std::vector<c10::Storage> held;
    std::unordered_map<const c10::StorageImpl*, std::size_t> number;
  };
  explicit SavedDigest(std::shared_ptr<const Parameters> parameters) : parameters_(std::move(parameters)) {}

  std::shared_ptr<const Parameters> parameters_;
  Digest digest_;
  std::vector<at::Tensor> on_devices_;  // one number of each tensor there
  std::size_t count_ = 0;
};

/// The number of a tensor by operators of torch, on whatever device it is: what is done on GPUs.
at::Tensor reduced_by_place(const at::Tensor& tensor);

}  // namespace hydra
