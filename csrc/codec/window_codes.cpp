#include "csrc/codec/window_codes.h"

#include <algorithm>
#include <atomic>

namespace hydra::codec {

namespace {

/// The rows of one task: enough to outweigh the task's cost.
std::int64_t rows_of_a_task(const PoolGeometry& geometry) {
  constexpr std::int64_t kLeast = 16384;
  return std::max<std::int64_t>(1, kLeast / std::max<std::int64_t>(1, geometry.row()));
}

template <class Body>
void for_each_row(const PoolGeometry& geometry, ThreadPool& threads, const Body& body) {
  const std::int64_t each = rows_of_a_task(geometry);
  const std::int64_t rows = geometry.rows();
  threads.parallel_for((rows + each - 1) / each, [&](std::int64_t task) {
    for (std::int64_t row = task * each; row < std::min(rows, (task + 1) * each); ++row) {
      body(row);
    }
  });
}

}  // namespace

bool encode_windows(const PoolGeometry& geometry, const std::int64_t* indices, std::uint8_t* stream,
                    ThreadPool& threads) {
  std::atomic<bool> any_wrong{false};
  for_each_row(geometry, threads, [&](std::int64_t row) {
    bool wrong = false;
    for (Bytes byte = 0; byte < geometry.row_bytes(); ++byte) {
      stream[row * geometry.row_bytes() + byte] = geometry.encoded(indices, row, byte, wrong);
    }
    if (wrong) {
      any_wrong.store(true);
    }
  });
  return !any_wrong.load();
}

void decode_windows(const PoolGeometry& geometry, const std::uint8_t* stream, std::int64_t* indices,
                    ThreadPool& threads) {
  for_each_row(geometry, threads, [&](std::int64_t row) {
    for (Bytes byte = 0; byte < geometry.row_bytes(); ++byte) {
      geometry.decode(stream[row * geometry.row_bytes() + byte], indices, row, byte);
    }
  });
}

}  // namespace hydra::codec
