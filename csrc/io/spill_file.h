// Bytes that the host has no room for: extents of one unnamed file, in a folder that the user names.
//
// An extent has its place on the disk from the moment it is reserved, so that a full disk is noticed then. It is
// written and read in pieces of at most kPieceBytes, as even as can be: a short one would take nearly as long as a long
// one where the disk has others to serve. The checksum of each piece is kept in memory: what is read is what was
// written last, or a SpillError; a write that never reached the disk is noticed like a damaged one. Where the file
// system allows it transfers pass the system's cache by, which would hold everything a second time.
//
// Owns the file, which ends with it. A piece whose write has failed has no bytes until it is written again; a read that
// failed may be tried again. Memory has to be a multiple of kDiskAlignment in place and size, that is an extent's bytes
// rounded up. Threads: any, but never two at one piece at the same time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/base/process.h"
#include "csrc/io/file_operations.h"

namespace hydra {

/// Of memory, offsets and sizes of transfers past the cache.
inline constexpr Bytes kDiskAlignment = 4096;
/// What is smaller is not worth a transfer of its own.
inline constexpr Bytes kLeastDiskBytes = 16 * kKiB;

class SpillFile {
 public:
  static constexpr Bytes kPieceBytes = 4 * kMiB;

  /// Throws SpillError if there can be no such file in the folder, or its file system is another machine's. `files` has
  /// to outlive it.
  explicit SpillFile(std::string folder, FileOperations& files = system_files());
  ~SpillFile();
  SpillFile(const SpillFile&) = delete;
  SpillFile& operator=(const SpillFile&) = delete;

  /// Room for so many bytes, for good. Throws SpillError if the disk has not got it; then nothing has changed.
  std::int32_t reserve(Bytes bytes);
  /// Of an extent, rounded up to kDiskAlignment.
  Bytes bytes(std::int32_t extent) const;
  std::int64_t pieces(std::int32_t extent) const;
  /// Of a piece; the last one may be shorter than the others.
  Bytes piece_bytes(std::int32_t extent, std::int64_t piece) const;

  /// `data` is where the extent begins in memory, not the piece.
  void write_piece(std::int32_t extent, std::int64_t piece, const void* data);
  /// Throws SpillError if the bytes are not those that were written, StateError if none were.
  void read_piece(std::int32_t extent, std::int64_t piece, void* data);

  const std::string& folder() const noexcept { return folder_; }
  bool bypasses_cache() const noexcept { return bypasses_cache_; }
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
  /// What is to be moved: from where on in the file.
  struct Span {
    Piece* piece = nullptr;
    Bytes begin = 0;  // in the extent
    Bytes offset = 0;
    Bytes bytes = 0;
  };

  Span span(std::int32_t extent, std::int64_t piece) const;
  /// Until all bytes have moved. `move`: from what is done on, so many that are left.
  void transfer(const Span& span, const char* doing, const std::function<ssize_t(Bytes, Bytes)>& move) const;
  Bytes progress(ssize_t result, int& interruptions) const noexcept;
  void try_bypassing_cache();

  const HomeProcess home_;
  const std::string folder_;
  FileOperations& files_;
  int descriptor_ = -1;
  bool bypasses_cache_ = false;
  mutable std::mutex mutex_;  // of the list; what it points to stays
  std::vector<std::unique_ptr<Extent>> extents_;
  Bytes reserved_ = 0;
};

}  // namespace hydra
