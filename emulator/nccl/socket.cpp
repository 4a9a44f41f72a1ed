#include "emulator/nccl/socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <system_error>

namespace emulated_cuda::nccl {

namespace {

constexpr int kBacklog = 64;

int checked(int result, const char* call) {
  if (result < 0) {
    throw std::system_error(errno, std::generic_category(), call);
  }
  return result;
}

Descriptor make_socket() { return Descriptor(checked(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), "socket")); }

/// The name of an address without a file begins with a zero.
sockaddr_un address_of(const std::string& name, socklen_t& size) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

}  // namespace

Descriptor::~Descriptor() {
  if (number_ >= 0) {
    ::close(number_);
  }
}

Listener::Listener() : socket_(make_socket()) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // Without a path the kernel chooses a free name.
  checked(::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(sa_family_t)), "bind");
  socklen_t size = sizeof(address);
  checked(::getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&address), &size), "getsockname");
  name_.assign(address.sun_path + 1, size - offsetof(sockaddr_un, sun_path) - 1);
  checked(::listen(socket_.get(), kBacklog), "listen");
}

Descriptor Listener::accept(int milliseconds) const {
  pollfd waiting{.fd = socket_.get(), .events = POLLIN, .revents = 0};
  if (::poll(&waiting, 1, milliseconds) <= 0) {
    return {};
  }
  return Descriptor(checked(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC), "accept"));
}

Descriptor connect_to(const std::string& name) {
  Descriptor socket = make_socket();
  socklen_t size = 0;
  const sockaddr_un address = address_of(name, size);
  checked(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), size), "connect");
  return socket;
}

void write_all(const Descriptor& socket, const void* data, std::size_t bytes) {
  if (::send(socket.get(), data, bytes, MSG_NOSIGNAL) != static_cast<ssize_t>(bytes)) {
    throw std::system_error(errno, std::generic_category(), "send");
  }
}

void read_all(const Descriptor& socket, void* data, std::size_t bytes) {
  if (::recv(socket.get(), data, bytes, MSG_WAITALL) != static_cast<ssize_t>(bytes)) {
    throw std::system_error(errno, std::generic_category(), "recv");
  }
}

void stop_blocking(const Descriptor& socket) {
  checked(::fcntl(socket.get(), F_SETFL, checked(::fcntl(socket.get(), F_GETFL), "fcntl") | O_NONBLOCK), "fcntl");
}

WakeFlag::WakeFlag() : event_(checked(::eventfd(0, EFD_CLOEXEC), "eventfd")) {}

void WakeFlag::raise() const noexcept {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(event_.get(), &one, sizeof(one));
}

}  // namespace emulated_cuda::nccl
