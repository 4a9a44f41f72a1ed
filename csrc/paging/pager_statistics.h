// Counts of one pager since it was made. They only grow. Sizes are bytes, times are seconds.
#pragma once

#include <cstdint>

#include "csrc/base/types.h"

namespace hydra {

struct PagerStatistics {
  std::int64_t loads = 0;       // all fills, for any reason
  std::int64_t prefetched = 0;  // fills begun ahead of their use
  std::int64_t faults = 0;      // operations that met an absent block
  std::int64_t evictions = 0;   // slots taken from a block with valid bytes
  std::int64_t spills = 0;      // evictions for allocations outside the pager
  std::int64_t write_backs = 0;
  std::int64_t order_changes = 0;  // passes whose order differed from the recorded one
  Bytes loaded_bytes = 0;
  Bytes written_back_bytes = 0;
  double hook_wait_seconds = 0.0;   // compute waited for a block that a hook had acquired
  double fault_wait_seconds = 0.0;  // compute waited for a block that it met absent
  double drain_wait_seconds = 0.0;  // the end of a pass waited for loads under way
};

}  // namespace hydra
