// Releases an acquired block at the end of a scope. The pager has to outlive it.
#pragma once

#include "csrc/paging/pager.h"

namespace hydra {

class AcquiredBlock {
 public:
  /// `block`: acquired before, with AcquireReason::kHook.
  AcquiredBlock(Pager& pager, std::int32_t block) noexcept : pager_(pager), block_(block) {}
  ~AcquiredBlock() { pager_.release(block_, AcquireReason::kHook); }
  AcquiredBlock(const AcquiredBlock&) = delete;
  AcquiredBlock& operator=(const AcquiredBlock&) = delete;

 private:
  Pager& pager_;
  const std::int32_t block_;
};

}  // namespace hydra
