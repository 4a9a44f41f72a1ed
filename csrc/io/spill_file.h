// Keeps tensors that the host has no room for: extents of one unnamed file.
//
// reserve() allocates an extent's room on the disk, so a full disk is noticed there. Extents are written and read in
// pieces of at most kPieceBytes and nearly equal size. On a busy disk a short piece takes nearly as long as a long one.
// The checksum of each piece stays in memory. A read returns the bytes of the last write, or throws SpillError: a write
// that never reached the disk is noticed like a damaged one. Where the file system allows it, transfers bypass the
// system's cache, which would hold every byte a second time.
//
// Owns the file, which ends with this object. A piece whose write has failed has no bytes until it is written again. A
// read that failed may be tried again. The caller's memory has to be aligned to kDiskAlignment, and to have room for
// the extent's bytes, which are rounded up to it. Sizes are bytes.
// Threads: any, but never two at the same piece at the same time. A forked child gets StateError.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/io/unnamed_file.h"

namespace hydra {

/// Smaller tensors stay on the host: they are not worth a transfer of their own.
inline constexpr Bytes kLeastDiskBytes = 16 * kKiB;

class SpillFile {
 public:
  static constexpr Bytes kPieceBytes = 4 * kMiB;

  /// Throws SpillError if the folder cannot have such a file, or is on a network file system. `files` has to outlive
  /// this object.
  explicit SpillFile(std::string folder, FileOperations& files = system_files());

  /// Reserves an extent of `bytes` until this object ends. Throws SpillError if the disk has no room; then nothing has
  /// changed.
  std::int32_t reserve(Bytes bytes);
  /// The size of an extent, rounded up to kDiskAlignment.
  Bytes bytes(std::int32_t extent) const;
  std::int64_t pieces(std::int32_t extent) const;
  /// The size of a piece; the last piece may be shorter than the others.
  Bytes piece_bytes(std::int32_t extent, std::int64_t piece) const;

  /// Writes one piece. `data` is the address of the whole extent in memory, not of the piece. Throws SpillError if the
  /// disk fails.
  void write_piece(std::int32_t extent, std::int64_t piece, const void* data);
  /// Reads one piece; `data` is as for write_piece(). Throws SpillError if the disk fails or the bytes are not those of
  /// the last write, and StateError if the piece was never written.
  void read_piece(std::int32_t extent, std::int64_t piece, void* data);

  const std::string& folder() const noexcept { return file_.folder(); }
  bool bypasses_cache() const noexcept { return file_.bypasses_cache(); }
  Bytes reserved_bytes() const;

 private:
  enum class PieceState : std::uint8_t { kNeverWritten, kWritten, kLost };
  struct Piece {
    PieceState state = PieceState::kNeverWritten;
    std::uint32_t checksum = 0;
  };
  struct Extent {
    Bytes offset = 0;
    Bytes bytes = 0;
    Bytes piece_bytes = 0;
    std::vector<Piece> pieces;
  };
  /// The bytes of one transfer, and their places in the extent and in the file.
  struct Span {
    Piece* piece = nullptr;
    Bytes begin = 0;   // in the extent
    Bytes offset = 0;  // in the file
    Bytes bytes = 0;
  };

  Span span(std::int32_t extent, std::int64_t piece) const;

  UnnamedFile file_;
  mutable std::mutex mutex_;  // guards the list and the file's size; extents stay where they are
  std::vector<std::unique_ptr<Extent>> extents_;
};

}  // namespace hydra
