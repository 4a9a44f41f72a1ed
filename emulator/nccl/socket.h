// Connections between the processes of one machine. Names are the kernel's: no file is left behind. Throws
// std::system_error.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

namespace emulated_cuda::nccl {

/// Owns a file descriptor.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) noexcept : number_(number) {}
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int get() const noexcept { return number_; }

 private:
  int number_ = -1;
};

/// A socket that others connect to by its name.
class Listener {
 public:
  Listener();

  const std::string& name() const noexcept { return name_; }
  /// Waits for the next connection, at most this long; the result owns nothing if none has come.
  Descriptor accept(int milliseconds) const;

 private:
  Descriptor socket_;
  std::string name_;
};

/// Connects to a listener of this name.
Descriptor connect_to(const std::string& name);
/// Both block, and are for few bytes.
void write_all(const Descriptor& socket, const void* data, std::size_t bytes);
void read_all(const Descriptor& socket, void* data, std::size_t bytes);
/// Later calls return at once, with what was possible.
void stop_blocking(const Descriptor& socket);

/// A flag that wakes poll().
class WakeFlag {
 public:
  WakeFlag();

  int descriptor() const noexcept { return event_.get(); }
  void raise() const noexcept;

 private:
  Descriptor event_;
};

}  // namespace emulated_cuda::nccl
