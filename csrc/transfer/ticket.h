// Completion of one asynchronous operation.
//
// Made by a lane, shared by all threads that wait. States go one way: queued -> enqueued -> done | failed.
// "Enqueued" means that the device knows of the operation, so that device-side waits for it are possible;
// lanes without a device queue pass it together with the end. Errors travel here and surface at wait().
// Thread-safe. Waiting blocks the host: never with the interpreter lock held. A forked child, where no lane runs,
// does not wait; wait() throws StateError there.
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

  /// Done or failed.
  bool finished() const noexcept;
  /// Blocks until finished; throws what the operation threw.
  void wait();
  /// Blocks until finished, whatever the outcome.
  void wait_quietly() noexcept;
  /// Blocks until the device knows of the operation, or it has finished.
  void wait_enqueued() noexcept;
  /// The error of a failed operation, else null.
  std::exception_ptr error() const noexcept;

  Bytes bytes() const noexcept { return bytes_; }
  /// Seconds its bytes were moving: without queueing, fences, latency and other jobs' pieces. 0 until done.
  double seconds() const noexcept;

  // For the lane that made the ticket. The first end counts; what comes after it is ignored.
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
