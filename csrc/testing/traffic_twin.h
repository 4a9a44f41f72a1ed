// The memory traffic of an update without its arithmetic, as the measure of an update's speed.
//
// It reads, or reads and writes, the same arrays in the same alternation as the update, with one XOR for each vector.
// Plain copies and sums would be a flattering measure, since writing an array without reading it costs more.
// Memory is the caller's. Blocks until the pool is done.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/base/thread_pool.h"

namespace hydra::testing {

/// The number of arrays of each kind; the digits are the bytes of an element.
struct Traffic {
  int update4 = 0;
  int update2 = 0;
  int read4 = 0;
  int read2 = 0;
  int write2 = 0;
  bool operator==(const Traffic&) const = default;
};

/// Goes through `count` elements of the arrays, which are in the order of Traffic's members, and makes their contents
/// meaningless. A remainder of fewer than 32 elements is left out. Throws StateError if no update has such traffic, or
/// the machine has neither AVX-512 nor AVX2.
void run_traffic_twin(const Traffic& traffic, const std::vector<void*>& arrays, std::int64_t count, ThreadPool& pool);

}  // namespace hydra::testing
