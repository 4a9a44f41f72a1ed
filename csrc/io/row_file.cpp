#include "csrc/io/row_file.h"

#include <algorithm>
#include <utility>

#include "csrc/base/errors.h"
#include "csrc/io/checksum.h"

namespace hydra {

RowFile::RowFile(std::string folder, std::int64_t rows, Bytes row_bytes, FileOperations& files)
    : file_(std::move(folder), files), row_bytes_(row_bytes) {
  HYDRA_EXPECT(rows > 0 && row_bytes > 0, StateError, "a file of rows has at least one row, of at least one byte");
  file_.extend(rows * row_bytes);
  const std::vector<std::byte> zeros(static_cast<std::size_t>(row_bytes));
  checksums_.assign(static_cast<std::size_t>(rows), crc32c(zeros.data(), row_bytes));
  states_.assign(static_cast<std::size_t>(rows), RowState::kBlank);
}

void RowFile::expect_rows(std::span<const std::int64_t> rows) const {
  file_.expect_here();
  for (const std::int64_t row : rows) {
    HYDRA_EXPECT(row >= 0 && row < this->rows(), StateError,
                 "row " + std::to_string(row) + " of a file that has " + std::to_string(this->rows()));
  }
}

void RowFile::in_runs(std::span<const std::int64_t> rows,
                      const std::function<void(std::int64_t, Bytes, Bytes)>& move) const {
  const auto most = static_cast<std::size_t>(std::max<Bytes>(1, kTransferBytes / row_bytes_));
  for (std::size_t done = 0; done < rows.size();) {
    std::size_t count = 1;
    while (count < std::min(most, rows.size() - done) &&
           rows[done + count] == rows[done] + static_cast<std::int64_t>(count)) {
      ++count;
    }
    move(rows[done] * row_bytes_, static_cast<Bytes>(count) * row_bytes_, static_cast<Bytes>(done) * row_bytes_);
    done += count;
  }
}

bool RowFile::is_blank(std::int64_t row) const { return states_.at(static_cast<std::size_t>(row)) == RowState::kBlank; }

void RowFile::read(std::span<const std::int64_t> rows, std::byte* to) {
  expect_rows(rows);
  for (const std::int64_t row : rows) {
    HYDRA_EXPECT(states_[static_cast<std::size_t>(row)] != RowState::kLost, SpillError,
                 "row " + std::to_string(row) + " in spill_dir '" + file_.folder() +
                     "' is lost: writing it failed before. Load the last checkpoint");
  }
  in_runs(rows, [&](Bytes offset, Bytes bytes, Bytes before) { file_.read(to + before, bytes, offset); });
  const std::byte* row_bytes = to;
  for (const std::int64_t row : rows) {
    HYDRA_EXPECT(crc32c(row_bytes, row_bytes_) == checksums_[static_cast<std::size_t>(row)], SpillError,
                 "row " + std::to_string(row) + " in spill_dir '" + file_.folder() +
                     "' is not what was written there: the disk is damaged. Load the last checkpoint, and use another "
                     "folder");
    row_bytes += row_bytes_;
  }
  read_ += static_cast<Bytes>(rows.size()) * row_bytes_;
}

void RowFile::read_ahead(std::span<const std::int64_t> rows) const {
  expect_rows(rows);
  in_runs(rows, [&](Bytes offset, Bytes bytes, Bytes) { file_.read_ahead(bytes, offset); });
}

void RowFile::begin_write(std::span<const std::int64_t> rows, const std::byte* from) {
  for (const std::int64_t row : rows) {
    states_[static_cast<std::size_t>(row)] = RowState::kLost;
    checksums_[static_cast<std::size_t>(row)] = crc32c(from, row_bytes_);
    from += row_bytes_;
  }
}

void RowFile::end_write(std::span<const std::int64_t> rows) {
  for (const std::int64_t row : rows) {
    states_[static_cast<std::size_t>(row)] = RowState::kWritten;
  }
  written_ += static_cast<Bytes>(rows.size()) * row_bytes_;
}

void RowFile::write(std::span<RowFile* const> files, std::span<const std::int64_t> rows,
                    std::span<const std::byte* const> from) {
  for (const RowFile* file : files) {
    file->expect_rows(rows);
  }
  for (std::size_t index = 0; index < files.size(); ++index) {
    files[index]->begin_write(rows, from[index]);
  }
  for (std::size_t index = 0; index < files.size(); ++index) {
    RowFile& to = *files[index];
    to.in_runs(rows,
               [&](Bytes offset, Bytes bytes, Bytes before) { to.file_.write(from[index] + before, bytes, offset); });
  }
  for (RowFile* file : files) {
    file->end_write(rows);
  }
}

void RowFile::write(std::span<const std::int64_t> rows, const std::byte* from) {
  RowFile* const file = this;
  write({&file, 1}, rows, {&from, 1});
}

}  // namespace hydra
