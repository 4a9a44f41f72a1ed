#include "csrc/io/spill_file.h"

#include <algorithm>
#include <utility>

#include "csrc/base/errors.h"
#include "csrc/io/checksum.h"

namespace hydra {
namespace {

constexpr Bytes divide_up(Bytes value, Bytes by) noexcept { return (value + by - 1) / by; }

}  // namespace

SpillFile::SpillFile(std::string folder, FileOperations& files) : file_(std::move(folder), files) {
  file_.try_bypassing_cache();
}

std::int32_t SpillFile::reserve(Bytes bytes) {
  const Bytes rounded = round_up(std::max<Bytes>(bytes, 1), kDiskAlignment);
  const std::lock_guard lock(mutex_);
  auto extent = std::make_unique<Extent>();
  extent->offset = file_.extend(rounded);
  extent->bytes = rounded;
  extent->piece_bytes = round_up(divide_up(rounded, divide_up(rounded, kPieceBytes)), kDiskAlignment);
  extent->pieces.resize(static_cast<std::size_t>(divide_up(rounded, extent->piece_bytes)));
  extents_.push_back(std::move(extent));
  return static_cast<std::int32_t>(extents_.size()) - 1;
}

Bytes SpillFile::bytes(std::int32_t extent) const {
  const std::lock_guard lock(mutex_);
  return extents_.at(static_cast<std::size_t>(extent))->bytes;
}

std::int64_t SpillFile::pieces(std::int32_t extent) const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::int64_t>(extents_.at(static_cast<std::size_t>(extent))->pieces.size());
}

Bytes SpillFile::piece_bytes(std::int32_t extent, std::int64_t piece) const { return span(extent, piece).bytes; }

Bytes SpillFile::reserved_bytes() const {
  const std::lock_guard lock(mutex_);
  return file_.bytes();
}

SpillFile::Span SpillFile::span(std::int32_t extent, std::int64_t piece) const {
  const std::lock_guard lock(mutex_);
  Extent& found = *extents_.at(static_cast<std::size_t>(extent));
  const Bytes begin = piece * found.piece_bytes;
  return {.piece = &found.pieces.at(static_cast<std::size_t>(piece)),
          .begin = begin,
          .offset = found.offset + begin,
          .bytes = std::min(found.piece_bytes, found.bytes - begin)};
}

void SpillFile::write_piece(std::int32_t extent, std::int64_t piece, const void* data) {
  file_.expect_here();
  const Span to = span(extent, piece);
  const auto* const from = static_cast<const std::byte*>(data) + to.begin;
  to.piece->state = PieceState::kLost;
  to.piece->checksum = crc32c(from, to.bytes);
  file_.write(from, to.bytes, to.offset);
  to.piece->state = PieceState::kWritten;
}

void SpillFile::read_piece(std::int32_t extent, std::int64_t piece, void* data) {
  file_.expect_here();
  const Span from = span(extent, piece);
  HYDRA_EXPECT(from.piece->state != PieceState::kNeverWritten, StateError,
               "piece " + std::to_string(piece) + " of extent " + std::to_string(extent) + " was never written");
  HYDRA_EXPECT(from.piece->state == PieceState::kWritten, SpillError,
               human_bytes(from.bytes) + " in spill_dir '" + folder() +
                   "' are lost: writing them failed before. Load the last checkpoint");
  auto* const to = static_cast<std::byte*>(data) + from.begin;
  file_.read(to, from.bytes, from.offset);
  HYDRA_EXPECT(crc32c(to, from.bytes) == from.piece->checksum, SpillError,
               human_bytes(from.bytes) + " in spill_dir '" + folder() +
                   "' are not what was written there: the disk is damaged. Load the last checkpoint, and use another "
                   "folder");
}

}  // namespace hydra
