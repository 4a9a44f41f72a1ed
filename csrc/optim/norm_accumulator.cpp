#include "csrc/optim/norm_accumulator.h"

#include <exception>

namespace hydra {

NormAccumulator::NormAccumulator(Summation summation) : summation_(std::move(summation)) {
  *thread_ = std::thread([this] { run(); });
}

NormAccumulator::~NormAccumulator() {
  if (!home_.here()) {
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_->notify_all();
  thread_->join();
}

// ---- the callers' side ---------------------------------------------------------------------------------------------

std::int64_t NormAccumulator::expect(Key key) {
  home_.expect_here();
  std::unique_lock lock(mutex_);
  changed_->wait(lock, [&] {
    const auto known = entries_.find(key);
    return known == entries_.end() || !known->second.running;
  });
  const std::int64_t number = ++expected_;
  held_.emplace_back(key, number);
  Entry& entry = entries_[key];
  entry = Entry();
  entry.number = number;
  return number;
}

void NormAccumulator::arrived(Key key, std::int64_t expected, const NormInput& gradient, Owner owner) {
  home_.expect_here();
  const std::lock_guard lock(mutex_);
  Entry* const entry = find_locked({key, expected});
  if (entry == nullptr) {
    return;
  }
  entry->has_arrived = true;
  entry->gradient = gradient;
  entry->sum.owner = std::move(owner);
  if (entry->released) {
    ready_.emplace_back(key, expected);
    changed_->notify_all();
  }
}

void NormAccumulator::release() {
  home_.expect_here();
  const std::lock_guard lock(mutex_);
  release_locked();
}

void NormAccumulator::release_locked() {
  for (const Part& part : std::exchange(held_, {})) {
    Entry* const entry = find_locked(part);
    if (entry != nullptr) {
      entry->released = true;
      if (entry->has_arrived) {
        ready_.push_back(part);
      }
    }
  }
  changed_->notify_all();
}

void NormAccumulator::finish() {
  home_.expect_here();
  std::unique_lock lock(mutex_);
  changed_->wait(lock, [this] { return !working_ && ready_.empty(); });
}

bool NormAccumulator::holds(Key key) {
  const std::lock_guard lock(mutex_);
  const auto known = entries_.find(key);
  return known != entries_.end() && known->second.sum.owner != nullptr;
}

void NormAccumulator::forget() {
  home_.expect_here();
  std::unique_lock lock(mutex_);
  ready_.clear();
  changed_->wait(lock, [this] { return !working_; });
  ready_.clear();
  held_.clear();
  entries_.clear();
}

std::unordered_map<NormAccumulator::Key, NormAccumulator::Sum> NormAccumulator::take() {
  home_.expect_here();
  std::unique_lock lock(mutex_);
  release_locked();
  changed_->wait(lock, [this] { return !working_ && ready_.empty(); });
  std::unordered_map<Key, Sum> sums;
  for (auto& [key, entry] : entries_) {
    if (entry.known) {
      sums.emplace(key, std::move(entry.sum));
    }
  }
  entries_.clear();
  return sums;
}

NormAccumulator::Entry* NormAccumulator::find_locked(const Part& part) {
  const auto found = entries_.find(part.first);
  return found != entries_.end() && found->second.number == part.second ? &found->second : nullptr;
}

// ---- the thread ----------------------------------------------------------------------------------------------------

std::vector<NormAccumulator::Part> NormAccumulator::begin_locked(std::vector<Part> parts,
                                                                 std::vector<NormInput>& gradients) {
  std::erase_if(parts, [&](const Part& part) {
    Entry* const entry = find_locked(part);
    if (entry != nullptr) {
      gradients.push_back(entry->gradient);
      entry->running = true;
    }
    return entry == nullptr;
  });
  return parts;
}

void NormAccumulator::run() noexcept {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_->wait(lock, [this] { return stopping_ || !ready_.empty(); });
    if (stopping_) {
      return;
    }
    std::vector<NormInput> gradients;
    const std::vector<Part> parts = begin_locked(std::exchange(ready_, {}), gradients);
    std::vector<double> sums(parts.size());
    working_ = true;
    lock.unlock();
    bool done = true;
    try {
      summation_(gradients, sums);
    } catch (const std::exception&) {  // take() omits these sums
      done = false;
    }
    lock.lock();
    working_ = false;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      Entry* const entry = find_locked(parts[i]);  // not null: running entries are neither replaced nor forgotten
      entry->running = false;
      entry->known = done;
      entry->sum.value = sums[i];
    }
    changed_->notify_all();
  }
}

}  // namespace hydra
