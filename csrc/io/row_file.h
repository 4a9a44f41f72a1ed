// Keeps a table's rows on the disk, in one unnamed file, where each can be read and written by itself.
//
// All room is allocated on construction, and all rows are zeros then. Rows that follow each other move in one transfer.
// Transfers go through the system's cache, since a row is smaller than what the disk moves. The checksum of each row
// stays in memory. A read returns the bytes of the last write, or throws SpillError.
//
// Owns the file, which ends with this object. If a write fails, its rows have no bytes until they are written again:
// what belongs together is lost together. A read that failed may be tried again. Sizes are bytes. Threads: any, but
// never two at the same row at the same time. A forked child gets StateError.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "csrc/io/unnamed_file.h"

namespace hydra {

class RowFile {
 public:
  /// The most that moves in one transfer.
  static constexpr Bytes kTransferBytes = kMiB;
  /// What is kept in memory of each row.
  static constexpr Bytes kNotesBytes = 5;

  /// Throws SpillError as UnnamedFile does, or if the disk has no room. `files` has to outlive this object.
  RowFile(std::string folder, std::int64_t rows, Bytes row_bytes, FileOperations& files = system_files());

  /// Reads rows, one behind the other. Throws SpillError if the disk fails or the bytes are not those of the last
  /// write.
  void read(std::span<const std::int64_t> rows, std::byte* to);
  /// Has the system read rows soon, so that read() need not wait for the disk. Returns at once.
  void read_ahead(std::span<const std::int64_t> rows) const;
  /// Writes rows, each named once. Throws SpillError if the disk fails: then all of them are lost.
  void write(std::span<const std::int64_t> rows, const std::byte* from);
  /// Writes the same rows of several files, which belong together: if the disk fails, all of them are lost in all
  /// files.
  static void write(std::span<RowFile* const> files, std::span<const std::int64_t> rows,
                    std::span<const std::byte* const> from);

  /// Whether a row has had no write, and so is zeros still.
  bool is_blank(std::int64_t row) const;
  std::int64_t rows() const noexcept { return static_cast<std::int64_t>(checksums_.size()); }
  Bytes row_bytes() const noexcept { return row_bytes_; }
  /// That have been moved by read() and write().
  Bytes bytes_read() const noexcept { return read_; }
  Bytes bytes_written() const noexcept { return written_; }

 private:
  enum class RowState : std::uint8_t { kBlank, kWritten, kLost };

  void expect_rows(std::span<const std::int64_t> rows) const;
  /// Notes that rows are being written, and what their checksums will be.
  void begin_write(std::span<const std::int64_t> rows, const std::byte* from);
  void end_write(std::span<const std::int64_t> rows);
  /// Calls `move(offset in the file, bytes, bytes before them)` for rows that follow each other and move together.
  void in_runs(std::span<const std::int64_t> rows, const std::function<void(Bytes, Bytes, Bytes)>& move) const;

  UnnamedFile file_;
  Bytes row_bytes_;
  std::vector<std::uint32_t> checksums_;
  std::vector<RowState> states_;
  std::atomic<Bytes> read_ = 0;
  std::atomic<Bytes> written_ = 0;
};

}  // namespace hydra
