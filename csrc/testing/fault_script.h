// Scripted faults for the simulated device: fail, delay or refuse the n-th operation of a kind.
//
// Rules of one kind add up. Thread-safe: a rule counts from the call that makes it, whatever is on its way then.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "csrc/transfer/simulated_device.h"

namespace hydra::testing {

enum class Operation : std::uint8_t { kToDevice, kToHost, kSlot };

class FaultScript final : public FaultInjector {
 public:
  /// The n-th operation from now, from 1, (and with `persistent` every later one) throws TransferError, or OutOfMemory
  /// for slots.
  void fail(Operation operation, std::int64_t nth, bool persistent);
  /// Every operation of the kind first sleeps a random time up to `seconds`, drawn from `seed`.
  void jitter(Operation operation, double seconds, std::uint64_t seed);
  /// Forgets rules, jitter and counts.
  void reset();
  /// Operations since construction or reset().
  std::int64_t count(Operation operation) const;
  /// Operations that a rule has met, since then.
  std::int64_t met() const;

  void before_job(Direction direction) override;
  void before_slot(Bytes bytes) override;

 private:
  struct Rule {
    Operation operation;
    std::int64_t number;
    bool persistent;
  };
  struct Jitter {
    double seconds = 0.0;
    std::uint64_t state = 0;
  };
  struct Outcome {
    std::int64_t number = 0;
    bool fails = false;
  };
  /// Counts one operation, sleeps its jitter, and says what the rules want of it.
  Outcome next(Operation operation);

  mutable std::mutex mutex_;
  std::vector<Rule> rules_;
  Jitter jitter_[3];
  std::int64_t counts_[3] = {0, 0, 0};
  std::int64_t met_ = 0;
};

}  // namespace hydra::testing
