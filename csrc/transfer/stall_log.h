// Seconds in which a device's compute stood still, because it, or the host that feeds it, waited for a lane, or for
// memory.
//
// A GPU tells times of what is in its stream, waits included. Without these seconds they are the times of compute. A
// wait of the host counts only as far as the stream ran empty behind it. While the log is off, a stall costs one
// relaxed load. Thread-safe; stalls of several threads at once count as one.
#pragma once

#include <cstdint>

namespace hydra {

class StallLog {
 public:
  StallLog() = default;
  StallLog(const StallLog&) = delete;
  StallLog& operator=(const StallLog&) = delete;
  virtual ~StallLog() = default;

  /// Turns the log on. It is empty then.
  virtual void start() = 0;
  virtual void stop() noexcept = 0;
  /// The number of stalls that have ended since start().
  virtual std::int64_t count() const noexcept = 0;
  /// The seconds of the stalls from one number up to and without another. Waits until the device has ended them.
  virtual double seconds(std::int64_t first, std::int64_t end) = 0;

 private:
  friend class Stall;

  /// Returns whether end() is to be called.
  virtual bool begin() noexcept = 0;
  virtual void end() noexcept = 0;
};

/// A wait, as long as it lives. Stalls inside are part of it.
class Stall {
 public:
  /// `log` may be null, and has to outlive the stall.
  explicit Stall(StallLog* log) noexcept : log_(log != nullptr && log->begin() ? log : nullptr) {}
  ~Stall() {
    if (log_ != nullptr) {
      log_->end();
    }
  }
  Stall(const Stall&) = delete;
  Stall& operator=(const Stall&) = delete;

 private:
  StallLog* const log_;
};

}  // namespace hydra
