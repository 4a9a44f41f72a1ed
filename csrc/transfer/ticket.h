// The completion of one asynchronous operation.
//
// A lane makes the ticket; all threads that wait share it. States go one way: queued -> enqueued -> done | failed.
// "Enqueued" means that the device knows the operation, so that device-side waits for it are possible. Lanes without a
// device queue pass this state together with the end. The ticket carries the operation's error, and wait() throws it.
// Thread-safe. Waiting blocks the host, and must not happen with the interpreter lock held. In a forked child no lane
// runs: wait() throws StateError there, and the other waits return at once. Sizes are bytes, times are seconds.
#pragma once

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>

#include "csrc/base/process.h"
#include "csrc/base/types.h"

namespace hydra {

class Ticket {
 public:
  explicit Ticket(Bytes bytes) noexcept : bytes_(bytes) {}
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;
  virtual ~Ticket() = default;

  /// Whether the operation is done or has failed.
  bool finished() const noexcept;
  /// Blocks until finished; throws the operation's error.
  void wait();
  /// Blocks until the operation is done or has failed. Throws no error.
  void wait_quietly() noexcept;
  /// Blocks until the device knows the operation, or the operation has finished.
  void wait_enqueued() noexcept;
  /// The error of a failed operation, else null.
  std::exception_ptr error() const noexcept;

  Bytes bytes() const noexcept { return bytes_; }
  /// The seconds in which its bytes moved, without queueing, fences, latency and other jobs' pieces. 0 until done.
  double seconds() const noexcept;

  // For the lane that made the ticket. The first end counts; later ones are ignored.
  void mark_enqueued() noexcept;
  void complete(double seconds) noexcept;
  void fail(std::exception_ptr error) noexcept;

 private:
  enum class State { kQueued, kEnqueued, kDone, kFailed };
  bool finished_locked() const noexcept { return state_ == State::kDone || state_ == State::kFailed; }

  const Bytes bytes_;
  const HomeProcess home_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::kQueued;
  double seconds_ = 0.0;
  std::exception_ptr error_;
};

using TicketPtr = std::shared_ptr<Ticket>;

}  // namespace hydra
