#include "emulator/nccl/communicator.h"

#include <cstdint>

#include "emulator/nccl/exchange.h"

namespace emulated_cuda::nccl {

namespace {

constexpr int kLook = 5;  // milliseconds between two looks for an abort

}  // namespace

Communicator::Communicator(int rank, int size)
    : rank_(rank), size_(size), to_(static_cast<std::size_t>(size)), from_(static_cast<std::size_t>(size)) {}

void Communicator::connect(const Meeting& meeting) {
  const Listener listener;
  const auto given_up = [this] { return aborted(); };
  meeting.tell(std::to_string(rank_), listener.name());
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) {
      Descriptor socket = connect_to(meeting.hear(std::to_string(peer), given_up));
      const std::int32_t own = rank_;
      write_all(socket, &own, sizeof(own));
      stop_blocking(socket);
      to_[static_cast<std::size_t>(peer)] = std::move(socket);
    }
  }
  for (int left = size_ - 1; left > 0;) {
    Descriptor socket = listener.accept(kLook);
    if (aborted()) {
      throw Aborted(error());
    }
    if (socket.get() < 0) {
      continue;
    }
    std::int32_t peer = 0;
    read_all(socket, &peer, sizeof(peer));
    from_.at(static_cast<std::size_t>(peer)) = std::move(socket);
    --left;
  }
}

void Communicator::exchange(const std::vector<Outgoing>& outgoing, const std::vector<Incoming>& incoming,
                            Clock::time_point deadline) {
  const std::lock_guard turn(turn_);
  if (aborted()) {
    throw Aborted(error());
  }
  if (const std::string earlier = error(); !earlier.empty()) {
    throw Failed(earlier);
  }
  Exchange exchange(rank_, to_, from_);
  for (const Outgoing& message : outgoing) {
    exchange.add(message);
  }
  for (const Incoming& message : incoming) {
    exchange.add(message);
  }
  try {
    exchange.run(wake_, deadline);
  } catch (const Failed& failed) {
    fail(failed.what());
    throw;
  }
}

void Communicator::abort() noexcept {
  fail("the communicator of rank " + std::to_string(rank_) + " was aborted");
  aborted_ = true;
  wake_.raise();
}

std::string Communicator::error() const {
  const std::lock_guard lock(mutex_);
  return message_;
}

void Communicator::fail(const std::string& message) {
  const std::lock_guard lock(mutex_);
  if (message_.empty()) {
    message_ = message;
  }
}

}  // namespace emulated_cuda::nccl
