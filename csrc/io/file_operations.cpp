#include "csrc/io/file_operations.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <string>

namespace hydra {
namespace {

template <class Result>
Result or_error(Result result) noexcept {
  return result < 0 ? static_cast<Result>(-errno) : result;
}

/// For file systems without unnamed files: creates a named file and unlinks it at once.
int open_and_unlink(const char* folder) {
  std::string name = std::string(folder) + "/.hydra_ext-XXXXXX";
  const int descriptor = ::mkostemp(name.data(), O_CLOEXEC);  // 0600, and never an existing one
  if (descriptor < 0) {
    return -errno;
  }
  if (::unlink(name.c_str()) != 0) {
    const int error = errno;
    ::close(descriptor);
    return -error;
  }
  return descriptor;
}

class SystemFiles final : public FileOperations {
 public:
  int open_unnamed(const char* folder) override {
    const int descriptor = ::open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC | O_EXCL, 0600);
    if (descriptor < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL)) {
      return open_and_unlink(folder);
    }
    return or_error(descriptor);
  }

  int bypass_cache(int descriptor, bool bypass) override {
    const int flags = ::fcntl(descriptor, F_GETFL);
    return flags < 0 ? -errno : or_error(::fcntl(descriptor, F_SETFL, bypass ? flags | O_DIRECT : flags & ~O_DIRECT));
  }

  int allocate(int descriptor, Bytes offset, Bytes bytes) override {
    return -::posix_fallocate(descriptor, offset, bytes);
  }

  ssize_t read(int descriptor, void* data, Bytes bytes, Bytes offset) override {
    return or_error(::pread(descriptor, data, static_cast<std::size_t>(bytes), offset));
  }

  ssize_t write(int descriptor, const void* data, Bytes bytes, Bytes offset) override {
    return or_error(::pwrite(descriptor, data, static_cast<std::size_t>(bytes), offset));
  }

  void close(int descriptor) noexcept override { ::close(descriptor); }

  void will_need(int descriptor, Bytes offset, Bytes bytes) noexcept override {
    ::posix_fadvise(descriptor, offset, bytes, POSIX_FADV_WILLNEED);
  }
};

}  // namespace

FileOperations& system_files() noexcept {
  static SystemFiles files;
  return files;
}

}  // namespace hydra
