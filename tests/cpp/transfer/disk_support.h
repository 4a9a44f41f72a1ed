// Memory for transfers that bypass the cache, a folder for files, and the list of its contents.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>

#include "csrc/io/spill_file.h"
#include "tests/cpp/support.h"

namespace hydra::test {

/// Aligned bytes.
class Buffer {
 public:
  explicit Buffer(Bytes bytes)
      : bytes_(round_up(bytes, kDiskAlignment)),
        data_(std::aligned_alloc(kDiskAlignment, static_cast<std::size_t>(bytes_)), &std::free) {
    std::memset(data(), 0, static_cast<std::size_t>(bytes_));
  }
  Buffer(Bytes bytes, std::uint32_t seed) : Buffer(bytes) {
    const std::vector<std::uint8_t> random = random_bytes(bytes_, seed);
    std::memcpy(data(), random.data(), random.size());
  }
  void* data() const { return data_.get(); }
  bool operator==(const Buffer& other) const {
    return bytes_ == other.bytes_ && std::memcmp(data(), other.data(), static_cast<std::size_t>(bytes_)) == 0;
  }

 private:
  Bytes bytes_;
  std::unique_ptr<void, decltype(&std::free)> data_;
};

/// A temporary folder, which the destructor removes.
class Folder {
 public:
  Folder() : path_((std::filesystem::temp_directory_path() / "hydra-spill-XXXXXX").string()) {
    EXPECT_NE(::mkdtemp(path_.data()), nullptr);
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const std::string& path() const { return path_; }
  bool empty() const { return std::filesystem::is_empty(path_); }

 private:
  std::string path_;
};

}  // namespace hydra::test
