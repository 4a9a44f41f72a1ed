// Scripted faults for the simulated device: the n-th operation of a kind fails, is late, or is refused.
//
// Rules of one kind add up. A rule counts the operations that begin after the call that makes it.
// Thread-safe. Times are seconds.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "csrc/transfer/fault_injector.h"

namespace hydra::testing {

enum class Operation : std::uint8_t { kToDevice, kToHost, kSlot };

class FaultScript final : public FaultInjector {
 public:
  /// Makes the n-th operation from now throw TransferError, or OutOfMemory for slots. Counts from 1. With `persistent`
  /// every later operation throws too.
  void fail(Operation operation, std::int64_t nth, bool persistent);
  /// Makes every operation of the kind first sleep a random time up to `seconds`, drawn from `seed`.
  void jitter(Operation operation, double seconds, std::uint64_t seed);
  /// Forgets rules, jitter and counts.
  void reset();
  /// Operations of the kind since construction or reset().
  std::int64_t count(Operation operation) const;
  /// Operations since construction or reset() that a rule has met.
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
  /// Counts one operation, sleeps its jitter, and returns what the rules make of it.
  Outcome next(Operation operation);

  mutable std::mutex mutex_;
  std::vector<Rule> rules_;
  Jitter jitter_[3];
  std::int64_t counts_[3] = {0, 0, 0};
  std::int64_t met_ = 0;
};

}  // namespace hydra::testing
