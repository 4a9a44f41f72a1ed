// The memory traffic of an update without its arithmetic: what an update is to be measured against. The same arrays
// are read, or read and written back, with one XOR for each vector, by turns as the update does it; plain copies and
// sums would flatter, since an array that is written without having been read costs more.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/base/thread_pool.h"

namespace hydra::testing {

/// How many arrays there are of each kind; the digits are the bytes of an element.
struct Traffic {
  int update4 = 0;
  int update2 = 0;
  int read4 = 0;
  int read2 = 0;
  int write2 = 0;
  bool operator==(const Traffic&) const = default;
};

/// Goes through `count` elements of the caller's arrays, which come in the order of Traffic's members; what they hold
/// becomes meaningless. Elements at the end that fill no 32 are left out. Throws StateError for a mix that no update
/// has, and without AVX-512 and AVX2.
void run_traffic_twin(const Traffic& traffic, const std::vector<void*>& arrays, std::int64_t count, ThreadPool& pool);

}  // namespace hydra::testing
