#include "csrc/testing/fault_script.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "csrc/base/errors.h"

namespace hydra::testing {
namespace {

std::size_t index(Operation operation) noexcept { return static_cast<std::size_t>(operation); }

/// SplitMix64: a small generator with the same numbers on every machine.
std::uint64_t next_random(std::uint64_t& state) noexcept {
  state += 0x9e3779b97f4a7c15ULL;
  std::uint64_t value = state;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

double next_fraction(std::uint64_t& state) noexcept {
  return static_cast<double>(next_random(state) >> 11) * 0x1.0p-53;
}

}  // namespace

void FaultScript::fail(Operation operation, std::int64_t nth, bool persistent) {
  const std::lock_guard lock(mutex_);
  rules_.push_back({.operation = operation, .number = counts_[index(operation)] + nth, .persistent = persistent});
}

void FaultScript::jitter(Operation operation, double seconds, std::uint64_t seed) {
  const std::lock_guard lock(mutex_);
  jitter_[index(operation)] = {.seconds = seconds, .state = seed};
}

void FaultScript::reset() {
  const std::lock_guard lock(mutex_);
  rules_.clear();
  std::ranges::fill(jitter_, Jitter{});
  std::ranges::fill(counts_, 0);
  met_ = 0;
}

std::int64_t FaultScript::count(Operation operation) const {
  const std::lock_guard lock(mutex_);
  return counts_[index(operation)];
}

std::int64_t FaultScript::met() const {
  const std::lock_guard lock(mutex_);
  return met_;
}

void FaultScript::before_job(Direction direction) {
  const bool to_device = direction == Direction::kToDevice;
  const Outcome outcome = next(to_device ? Operation::kToDevice : Operation::kToHost);
  HYDRA_EXPECT(!outcome.fails, TransferError,
               std::string("scripted fault: copy ") + std::to_string(outcome.number) +
                   (to_device ? " to the device" : " to the host") + " was told to fail");
}

void FaultScript::before_slot(Bytes bytes) {
  const Outcome outcome = next(Operation::kSlot);
  HYDRA_EXPECT(!outcome.fails, OutOfMemory,
               "scripted fault: slot " + std::to_string(outcome.number) + " of " + human_bytes(bytes) +
                   " was told to be refused");
}

FaultScript::Outcome FaultScript::next(Operation operation) {
  Outcome outcome;
  double seconds = 0.0;
  {
    const std::lock_guard lock(mutex_);
    outcome.number = ++counts_[index(operation)];
    outcome.fails = std::ranges::any_of(rules_, [&](const Rule& rule) {
      return rule.operation == operation &&
             (rule.persistent ? outcome.number >= rule.number : outcome.number == rule.number);
    });
    met_ += outcome.fails ? 1 : 0;
    Jitter& jitter = jitter_[index(operation)];
    if (jitter.seconds > 0.0) {
      seconds = jitter.seconds * next_fraction(jitter.state);
    }
  }
  // Outside the lock, so that one operation's delay does not delay the others.
  if (seconds > 0.0) {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  }
  return outcome;
}

}  // namespace hydra::testing
