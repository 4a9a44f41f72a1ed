// A digest of the tensors that a call saved for backward, or returned. Equal digests mean that two calls did the same.
//
// The digest covers, in order, the dtype, sizes, strides and numbers of each tensor, and depends on each number's
// position. For parameters and their views it has the identity of the parameter instead of the numbers, since two
// parameters may have equal numbers today. Numbers on a GPU are reduced there, a bounded part at a time; the results
// come to the host when two digests are compared. Numbers on the host are read in place. Ownership: keeps the
// parameters' storages alive, so that no other storage gets their addresses. Threads: one at a time.
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
  /// Returns an empty digest with the same parameters.
  [[nodiscard]] SavedDigest fresh() const;
  /// Adds a tensor. Returns false, and adds nothing, if it cannot be compared: if it is sparse, nested, quantised, of a
  /// class of its own, or a one-dimensional tensor of bytes, which may be a library's private data.
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
  std::vector<at::Tensor> on_devices_;  // one number for each tensor on a device
  std::size_t count_ = 0;
};

/// Reduces a tensor to one number on its own device, the sum of place_sum.h. Used for tensors on GPUs.
at::Tensor reduced_by_place(const at::Tensor& tensor);

/// Adds a tensor's sum to a number on the same device. Returns false, and adds nothing, if it cannot.
using AddByPlace = bool (*)(const at::Tensor& tensor, const at::Tensor& sum);
/// What takes the place of operators of torch; builds with CUDA set it before any digest is made.
void set_add_by_place(AddByPlace add) noexcept;
AddByPlace add_by_place_on_cuda() noexcept;

}  // namespace hydra
