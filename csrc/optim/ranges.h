// Divides several arrays into ranges of one length and numbers them consecutively, so that threads share work evenly.
//
// Counts are elements. Not thread-safe while items are added; const methods are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace hydra {

struct Range {
  std::size_t item;
  std::int64_t begin;
  std::int64_t end;
};

class Ranges {
 public:
  explicit Ranges(std::int64_t length) : length_(length) {}

  void add(std::int64_t count) {
    counts_.push_back(count);
    ends_.push_back(size() + (count + length_ - 1) / length_);
  }

  std::int64_t size() const noexcept { return ends_.empty() ? 0 : ends_.back(); }
  /// The number behind the last range of an item.
  std::int64_t end_of(std::size_t item) const noexcept { return ends_[item]; }

  Range operator[](std::int64_t index) const noexcept {
    const auto item = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), index) - ends_.begin());
    const std::int64_t begin = (index - (item == 0 ? 0 : ends_[item - 1])) * length_;
    return {.item = item, .begin = begin, .end = std::min(begin + length_, counts_[item])};
  }

 private:
  std::int64_t length_;
  std::vector<std::int64_t> counts_;
  std::vector<std::int64_t> ends_;
};

}  // namespace hydra
