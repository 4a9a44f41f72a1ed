// A communicator: the connections of some ranks, by which an operation's kernels wait for one another and exchange
// data. The stand-in for NCCL's.
//
// Making one blocks the caller until all ranks have come. `exchange` runs on the thread of a stream. It ends when all
// that it sends has been received, and all that it receives is there: no buffer hides a wait. Each message begins with
// its operation's header. What does not fit, which would hang or corrupt memory with NCCL, is an error of both sides
// that names both operations. A rank that has died is not noticed, as by NCCL's kernels: the exchange goes on until
// abort() or its deadline. Thread-safe; exchanges take turns.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "emulator/nccl/header.h"
#include "emulator/nccl/socket.h"

namespace emulated_cuda::nccl {

using Clock = std::chrono::steady_clock;

/// abort() was called.
class Aborted : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The ranks' operations do not fit, or one of them did not come in time.
class Failed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Where ranks find each other's addresses.
struct Meeting {
  std::function<void(const std::string& key, const std::string& value)> tell;
  /// Waits until the key is known; throws if `given_up` returns true before.
  std::function<std::string(const std::string& key, const std::function<bool()>& given_up)> hear;
};

struct Outgoing {
  int peer = 0;
  Header header;
  const void* data = nullptr;
};

struct Incoming {
  int peer = 0;
  Header expected;
  void* data = nullptr;
};

class Communicator {
 public:
  Communicator(int rank, int size);
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// Blocks until all ranks have come. Throws Aborted, or what the meeting throws.
  void connect(const Meeting& meeting);

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  /// The number of the next operation.
  std::uint64_t next_sequence() noexcept { return ++sequence_; }

  /// Messages to one rank, and from one, keep their order. Throws Aborted and Failed; a communicator that has failed
  /// stays so.
  void exchange(const std::vector<Outgoing>& outgoing, const std::vector<Incoming>& incoming,
                Clock::time_point deadline);

  /// Ends the exchange under way, and all later ones. Never blocks.
  void abort() noexcept;
  bool aborted() const noexcept { return aborted_; }
  /// Why it has failed or was aborted; empty if it works.
  std::string error() const;

 private:
  void fail(const std::string& message);

  const int rank_;
  const int size_;
  std::atomic<std::uint64_t> sequence_{0};
  std::atomic<bool> aborted_{false};
  WakeFlag wake_;
  std::vector<Descriptor> to_;    // by rank; answers come back on it
  std::vector<Descriptor> from_;  // by rank
  std::mutex turn_;               // of exchanges
  mutable std::mutex mutex_;      // of the message
  std::string message_;
};

}  // namespace emulated_cuda::nccl
