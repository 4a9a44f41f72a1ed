#include "csrc/base/device_turns.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "csrc/base/errors.h"

namespace hydra {
namespace {

thread_local DeviceTurns::Seat own_seat;
std::atomic<bool (*)()> keeps_turn{nullptr};

/// Whether the calling thread is a tenant's that may pass the turn on.
bool may_pass_on() noexcept {
  if (own_seat.turns == nullptr || own_seat.undisturbed > 0) {
    return false;
  }
  bool (*const keeps)() = keeps_turn.load(std::memory_order_relaxed);
  return keeps == nullptr || !keeps();
}

}  // namespace

// ---- tenants ----------------------------------------------------------------------------------

DeviceTurns::Tenant DeviceTurns::admit() {
  const std::lock_guard lock(mutex_);
  states_.emplace_back();
  waiting_.reserve(states_.size());  // so that waiting never allocates
  return states_.size() - 1;
}

void DeviceTurns::enter(Tenant tenant) {
  HYDRA_EXPECT(own_seat.turns == nullptr, StateError, "this thread is a tenant of a shared device already");
  {
    const std::lock_guard lock(mutex_);
    HYDRA_EXPECT(tenant < states_.size(), StateError, "the shared device has no tenant " + std::to_string(tenant));
  }
  take(tenant);
  own_seat = {.turns = this, .tenant = tenant};
}

void DeviceTurns::leave() {
  HYDRA_EXPECT(own_seat.turns == this, StateError, "this thread is no tenant of the shared device");
  own_seat = {};
  pass_on();
}

double DeviceTurns::computed(Tenant tenant) const {
  const std::lock_guard lock(mutex_);
  return computed_locked(tenant);
}

std::int64_t DeviceTurns::switches() const {
  const std::lock_guard lock(mutex_);
  return switches_;
}

DeviceTurns::Seat DeviceTurns::seat() noexcept { return own_seat; }

void DeviceTurns::take_over(const Seat& seat) noexcept { own_seat = seat; }

void DeviceTurns::keep_turn_if(bool (*holds)()) noexcept { keeps_turn = holds; }

// ---- turns ------------------------------------------------------------------------------------

void DeviceTurns::offer() {
  if (!may_pass_on()) {
    return;
  }
  const Seat seat = own_seat;
  DeviceTurns& turns = *seat.turns;
  std::unique_lock lock(turns.mutex_);
  const std::optional<Tenant> next = turns.first_waiting();
  if (next && turns.goes_before(*next, seat.tenant, kAffinity)) {
    turns.pass_on_locked(next);
    turns.await_locked(lock, seat.tenant);
  }
}

void DeviceTurns::take(Tenant tenant) noexcept {
  std::unique_lock lock(mutex_);
  await_locked(lock, tenant);
}

void DeviceTurns::await_locked(std::unique_lock<std::mutex>& lock, Tenant tenant) {
  State& state = states_[tenant];
  if (present_) {
    waiting_.push_back(tenant);
    state.wake.wait(lock, [&] { return present_ == tenant; });
  }
  present_ = tenant;
  state.since = Clock::now();  // the time of waking up is not counted
  const std::optional<Tenant> before = std::exchange(last_, tenant);
  switches_ += before && *before != tenant ? 1 : 0;
  lock.unlock();
  if (before != tenant) {
    on_switch_(before, tenant);
  }
}

void DeviceTurns::pass_on() noexcept {
  const std::lock_guard lock(mutex_);
  pass_on_locked(first_waiting());
}

void DeviceTurns::pass_on_locked(std::optional<Tenant> next) noexcept {
  State& state = states_[*present_];
  state.computed += seconds_since(state.since);
  present_ = next;
  if (next) {
    std::erase(waiting_, *next);
    states_[*next].since = Clock::now();  // until it wakes up: computed() may be asked before
    states_[*next].wake.notify_one();
  }
}

std::optional<DeviceTurns::Tenant> DeviceTurns::first_waiting() const noexcept {
  const auto first = std::ranges::min_element(
      waiting_, [this](Tenant one, Tenant other) { return goes_before(one, other, /*affinity=*/0.0); });
  return first == waiting_.end() ? std::nullopt : std::optional(*first);
}

bool DeviceTurns::goes_before(Tenant one, Tenant other, double affinity) const noexcept {
  return computed_locked(one) + affinity < computed_locked(other);
}

double DeviceTurns::computed_locked(Tenant tenant) const noexcept {
  const State& state = states_[tenant];
  return state.computed + (present_ == tenant ? seconds_since(state.since) : 0.0);
}

// ---- pauses -----------------------------------------------------------------------------------

Pause::Pause() noexcept : seat_(own_seat) {
  if (may_pass_on()) {
    seat_.turns->pass_on();
    ++own_seat.undisturbed;  // a wait inside this one is part of it
  } else {
    seat_.turns = nullptr;
  }
}

Pause::~Pause() {
  if (seat_.turns != nullptr) {
    --own_seat.undisturbed;
    seat_.turns->take(seat_.tenant);
  }
}

Undisturbed::Undisturbed() noexcept { ++own_seat.undisturbed; }

Undisturbed::~Undisturbed() { --own_seat.undisturbed; }

}  // namespace hydra
