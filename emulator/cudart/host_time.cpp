#include "emulator/cudart/host_time.h"

#include <pthread.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>

namespace emulated_cuda::cudart {

namespace {

constexpr int kTrials = 2000;

std::int64_t processor_time(clockid_t clock) noexcept {
  timespec time{};
  ::clock_gettime(clock, &time);
  return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

// ---- one thread -----------------------------------------------------------------------------------------------------

HostTime::Account::Account(HostTime& of) : owner(of) {
  ::pthread_getcpuclockid(::pthread_self(), &clock);
  const std::lock_guard lock(owner.mutex_);
  owner.accounts_.push_back(this);
}

HostTime::Account::~Account() {
  const std::lock_guard lock(owner.mutex_);
  owner.ended_ += counted();
  owner.accounts_.remove(this);
}

std::int64_t HostTime::Account::counted() const noexcept {
  if (!counts()) {
    return 0;
  }
  // In this order: what ends meanwhile is taken out too early, and never too late.
  const std::int64_t time = processor_time(clock);
  const std::int64_t pausing = pause;
  const std::int64_t until = pausing < 0 ? time : std::min(time, pausing);
  return std::max<std::int64_t>(until - begin - paused, 0);
}

HostTime::Account& HostTime::account() {
  // Destructors of other thread-local objects may still use the emulator when this one is gone.
  thread_local Account* account = nullptr;
  thread_local bool has_ended = false;
  struct Ender {
    ~Ender() {
      const std::unique_ptr<Account> ended(std::exchange(account, nullptr));
      has_ended = true;
    }
  };
  if (account == nullptr) {
    account = std::make_unique<Account>(get()).release();
    if (!has_ended) {
      thread_local const Ender ender;
    }
  }
  return *account;
}

// ---- all threads ----------------------------------------------------------------------------------------------------

HostTime& HostTime::get() {
  static HostTime& time = *std::make_unique<HostTime>().release();  // outlives all threads
  return time;
}

void HostTime::start(std::int64_t now) {
  ++epoch_;
  base_ = now;
  added_ = 0;
  latest_ = 0;
  ended_ = 0;
  cost_ = 0;
  count_this_thread();
  cost_ = cost_of_pause();
}

void HostTime::count_this_thread() {
  Account& own = account();
  if (own.epoch != epoch_) {
    own.begin = processor_time(CLOCK_THREAD_CPUTIME_ID);
    own.pause = own.pause < 0 ? std::int64_t{-1} : own.begin.load();
    own.paused = 0;
    own.epoch = epoch_.load();
  }
}

std::int64_t HostTime::cost_of_pause() {
  const Account& own = account();
  const std::int64_t before = own.counted();
  for (int i = 0; i < kTrials; ++i) {
    const Pause pause;
  }
  return (own.counted() - before) / kTrials;
}

void HostTime::charge(std::int64_t time) noexcept {
  if (account().counts()) {
    added_ += time;
  }
}

std::int64_t HostTime::now() noexcept {
  std::int64_t time = base_ + added_ + ended_;
  {
    const std::shared_lock lock(mutex_);
    for (const Account* const account : accounts_) {
      time += account->counted();
    }
  }
  std::int64_t latest = latest_;
  while (latest < time && !latest_.compare_exchange_weak(latest, time)) {
  }
  return std::max(time, latest);
}

// ---- pauses ---------------------------------------------------------------------------------------------------------

Pause::Pause() noexcept : account_(HostTime::account()) {
  if (account_.pauses++ == 0 && account_.epoch != 0) {
    account_.pause = processor_time(CLOCK_THREAD_CPUTIME_ID);
  }
}

Pause::~Pause() {
  if (--account_.pauses == 0 && account_.pause >= 0) {
    account_.paused += processor_time(CLOCK_THREAD_CPUTIME_ID) - account_.pause + account_.owner.cost_;
    account_.pause = -1;
  }
}

}  // namespace emulated_cuda::cudart
