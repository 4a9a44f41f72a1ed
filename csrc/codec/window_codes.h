// Where in its window a pool found each maximum: a few bits instead of an index of 8 bytes. Exact.
//
// An index counts the elements of an input's plane. That of output (y, x) is at most the window's area of values away
// from where the window begins, and its code says which one of them it is. Codes have 1, 2, 4 or 8 bits; those of a row
// of outputs follow each other from the lowest bit of a byte on, and each row begins with a new byte.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "csrc/base/thread_pool.h"
#include "csrc/base/types.h"

namespace hydra::codec {

/// Of a pool in two dimensions, each array with that of the rows first.
struct PoolGeometry {
  std::array<std::int64_t, 2> kernel{};
  std::array<std::int64_t, 2> stride{};
  std::array<std::int64_t, 2> padding{};
  std::array<std::int64_t, 2> dilation{};
  std::int64_t input_width = 0;
  std::array<std::int64_t, 2> outputs{};
  std::int64_t planes = 0;  // that follow each other in memory
  std::int64_t inner = 1;   // values of one output that lie side by side: channels, where they come last

  bool operator==(const PoolGeometry&) const = default;

  constexpr std::int64_t rows() const noexcept { return planes * outputs[0]; }
  constexpr std::int64_t row() const noexcept { return outputs[1] * inner; }
  constexpr std::int64_t count() const noexcept { return rows() * row(); }
  constexpr std::int64_t area() const noexcept { return kernel[0] * kernel[1]; }
  /// Of a code; 0 where there are too many.
  constexpr int bits() const noexcept {
    return area() <= 2 ? 1 : area() <= 4 ? 2 : area() <= 16 ? 4 : area() <= 256 ? 8 : 0;
  }
  constexpr Bytes row_bytes() const noexcept { return (row() * bits() + 7) / 8; }
  constexpr Bytes stream_bytes() const noexcept { return rows() * row_bytes(); }

  /// The index that a window of outputs begins with: that of the row's, and of the output in the row.
  constexpr std::int64_t begin_of_row(std::int64_t row) const noexcept {
    return (row % outputs[0] * stride[0] - padding[0]) * input_width - padding[1];
  }
  constexpr std::int64_t begin_in_row(std::int64_t in_row) const noexcept {
    return (inner == 1 ? in_row : in_row / inner) * stride[1];
  }
  constexpr std::optional<int> code(std::int64_t from_begin) const noexcept {
    int code = 0;
    for (std::int64_t down = 0; down < kernel[0]; ++down) {
      for (std::int64_t across = 0; across < kernel[1]; ++across, ++code) {
        if ((down * dilation[0] * input_width) + across * dilation[1] == from_begin) {
          return code;
        }
      }
    }
    return std::nullopt;
  }
  constexpr std::int64_t from_begin(unsigned code) const noexcept {
    const auto width = static_cast<unsigned>(kernel[1]);
    return code / width * dilation[0] * input_width + code % width * dilation[1];
  }

  /// A byte of a row's codes from its indices; `wrong` is set where one is in no window.
  constexpr std::uint8_t encoded(const std::int64_t* indices, std::int64_t row_number, std::int64_t byte,
                                 bool& wrong) const noexcept {
    const int each = 8 / bits();
    const std::int64_t begin = begin_of_row(row_number);
    unsigned packed = 0;
    for (int place = 0; place < each && byte * each + place < row(); ++place) {
      const std::int64_t in_row = byte * each + place;
      const std::optional<int> found = code(indices[row_number * row() + in_row] - begin - begin_in_row(in_row));
      wrong |= !found;
      packed |= static_cast<unsigned>(found.value_or(0)) << (place * bits());
    }
    return static_cast<std::uint8_t>(packed);
  }
  constexpr void decode(std::uint8_t packed, std::int64_t* indices, std::int64_t row_number,
                        std::int64_t byte) const noexcept {
    const int each = 8 / bits();
    const unsigned mask = (1U << bits()) - 1;
    const std::int64_t begin = begin_of_row(row_number);
    for (int place = 0; place < each && byte * each + place < row(); ++place) {
      const std::int64_t in_row = byte * each + place;
      const unsigned found = static_cast<unsigned>(packed) >> (place * bits()) & mask;
      const unsigned code = found < area() ? found : 0;  // of bytes that were none: an index in the window all the same
      indices[row_number * row() + in_row] = begin + begin_in_row(in_row) + from_begin(code);
    }
  }
};

/// Writes stream_bytes() from count() indices. False where one is in no window; what was written is undefined then.
bool encode_windows(const PoolGeometry& geometry, const std::int64_t* indices, std::uint8_t* stream,
                    ThreadPool& threads);
void decode_windows(const PoolGeometry& geometry, const std::uint8_t* stream, std::int64_t* indices,
                    ThreadPool& threads);

}  // namespace hydra::codec
