// The sizes of batches, and the index into a flat array for each stage and microbatch.
#pragma once

#include <utility>
#include <vector>

#include "csrc/schedule/action.h"

namespace hydra::schedule {

class BatchIndex {
 public:
  /// `sizes`: the numbers of microbatches in batches 0, 1, ...
  BatchIndex(int stages, std::vector<int> sizes) : stages_(index(stages)), sizes_(std::move(sizes)) {
    for (const int size : sizes_) {
      firsts_.push_back(total_);
      total_ += index(size);
    }
  }

  std::int64_t batches() const noexcept { return static_cast<std::int64_t>(sizes_.size()); }
  int size(std::int64_t batch) const { return sizes_[index(batch)]; }
  bool has(const Action& action) const {
    return action.batch >= 0 && action.batch < batches() && action.microbatch >= 0 &&
           action.microbatch < (is_of_batch(action.kind) ? 1 : size(action.batch));
  }

  std::size_t microbatch_places() const noexcept { return stages_ * total_; }
  std::size_t microbatch_place(int stage, std::int64_t batch, int microbatch) const {
    return index(stage) * total_ + firsts_[index(batch)] + index(microbatch);
  }

 private:
  std::size_t stages_;
  std::vector<int> sizes_;
  std::vector<std::size_t> firsts_;
  std::size_t total_ = 0;
};

}  // namespace hydra::schedule
