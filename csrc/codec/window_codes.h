// Codes for the indices of a max pool: the maximum's position in its window, in a few bits instead of 8 bytes. Exact.
//
// An index counts the elements of an input's plane. The window of output (y, x) has as many elements as its area, and
// the code says which of them is the maximum. Codes have 1, 2, 4 or 8 bits. The codes of a row of outputs follow each
// other from the lowest bit of a byte on; each row begins with a new byte.
// Memory is the caller's. Reentrant. Sizes are bytes.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "csrc/base/thread_pool.h"
#include "csrc/base/types.h"

namespace hydra::codec {

/// The geometry of a two-dimensional pool. Each array has the value for rows first.
struct PoolGeometry {
  std::array<std::int64_t, 2> kernel{};
  std::array<std::int64_t, 2> stride{};
  std::array<std::int64_t, 2> padding{};
  std::array<std::int64_t, 2> dilation{};
  std::int64_t input_width = 0;
  std::array<std::int64_t, 2> outputs{};
  std::int64_t planes = 0;  // planes that follow each other in memory
  std::int64_t inner = 1;   // values of one output that lie side by side: the channels, in a channels-last layout

  bool operator==(const PoolGeometry&) const = default;

  constexpr std::int64_t rows() const noexcept { return planes * outputs[0]; }
  constexpr std::int64_t row() const noexcept { return outputs[1] * inner; }
  constexpr std::int64_t count() const noexcept { return rows() * row(); }
  constexpr std::int64_t area() const noexcept { return kernel[0] * kernel[1]; }
  /// The bits of a code; 0 if the window is too large for codes.
  constexpr int bits() const noexcept {
    return area() <= 2 ? 1 : area() <= 4 ? 2 : area() <= 16 ? 4 : area() <= 256 ? 8 : 0;
  }
  constexpr Bytes row_bytes() const noexcept { return (row() * bits() + 7) / 8; }
  constexpr Bytes stream_bytes() const noexcept { return rows() * row_bytes(); }

  /// The sum of the two is the index of the first element in an output's window.
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

  /// Encodes the indices of one byte of a row's codes. Sets `wrong` if an index lies outside its window.
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
      const unsigned code = found < area() ? found : 0;  // damaged bytes, too, give an index inside the window
      indices[row_number * row() + in_row] = begin + begin_in_row(in_row) + from_begin(code);
    }
  }
};

/// Writes stream_bytes() from count() indices. Returns false if an index lies outside its window; the bytes written are
/// undefined then.
bool encode_windows(const PoolGeometry& geometry, const std::int64_t* indices, std::uint8_t* stream,
                    ThreadPool& threads);
void decode_windows(const PoolGeometry& geometry, const std::uint8_t* stream, std::int64_t* indices,
                    ThreadPool& threads);

}  // namespace hydra::codec
