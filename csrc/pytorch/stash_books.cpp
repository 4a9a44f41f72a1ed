#include "csrc/pytorch/stash_books.h"

#include <algorithm>

namespace hydra {

StashedInterval::~StashedInterval() { books->forget(*this); }

StashedIntervalPtr StashBooks::find(const c10::Storage& storage, Bytes begin, Bytes end, VersionMark mark) const {
  const auto found = known_.find(storage.unsafeGetStorageImpl());
  if (found == known_.end() || mark.counter == nullptr) {
    return nullptr;
  }
  for (const std::weak_ptr<StashedInterval>& known : found->second) {
    StashedIntervalPtr interval = known.lock();
    // The counter cannot be another one at the same address: the interval's tensors have theirs, as this one has.
    if (interval && interval->saved_at == mark && interval->begin <= begin &&
        end <= interval->begin + interval->bytes && interval->storage == storage.unsafeGetStorageImpl() &&
        interval->data == storage.data()) {
      return interval;
    }
  }
  return nullptr;
}

StashedIntervalPtr StashBooks::enter(const c10::Storage& storage, Bytes begin, Bytes bytes, Bytes lead,
                                     VersionMark mark) {
  const Bytes before = std::exchange(pass_bytes_, pass_bytes_ + bytes);
  const bool at_once =
      !budget_ || !last_pass_bytes_ || before >= *last_pass_bytes_ || *last_pass_bytes_ - before > *budget_;
  auto interval = std::make_shared<StashedInterval>(shared_from_this(), numbered_++, bytes, lead, mark, at_once);
  saved_[interval->number] = interval;
  largest_ = std::max(largest_, bytes);
  ++statistics.intervals;
  statistics.saved_bytes += bytes;
  hold(interval, storage, begin);
  return interval;
}

void StashBooks::hold(const StashedIntervalPtr& interval, c10::Storage storage, Bytes begin) {
  auto* const impl = storage.unsafeGetStorageImpl();
  if (std::ranges::find(interval->known_by, impl) == interval->known_by.end()) {
    interval->known_by.push_back(impl);
    known_[impl].push_back(interval);
  }
  interval->lent = storage.getWeakStorageImpl();
  interval->storage = impl;
  interval->data = storage.data();
  interval->held = std::move(storage);
  interval->begin = begin;
  held_[interval->number] = interval;
  statistics.held_bytes += interval->bytes;
  statistics.peak_held_bytes = std::max(statistics.peak_held_bytes, statistics.held_bytes);
}

c10::Storage StashBooks::let_go(StashedInterval& interval) {
  if (!interval.held) {
    return {};
  }
  held_.erase(interval.number);
  statistics.held_bytes -= interval.bytes;
  return std::exchange(interval.held, c10::Storage());
}

c10::Storage StashBooks::alive(const StashedInterval& interval) const {
  if (interval.held) {
    return interval.held;
  }
  c10::intrusive_ptr<c10::StorageImpl> lent = interval.lent.lock();
  // Others may have given it other memory.
  return lent && lent->data() == interval.data ? c10::Storage(std::move(lent)) : c10::Storage();
}

StashedIntervalPtr StashBooks::oldest_held() {
  for (const auto& [number, known] : held_) {
    StashedIntervalPtr interval = known.lock();
    if (!interval || interval->stays) {
      continue;
    }
    if (!interval->host && interval->leaving && interval->leaving->finished()) {
      interval->stays = true;  // it has failed
      ++statistics.stayed;
      continue;
    }
    if (interval->host || interval->leaving || !interval->begun_to_leave) {
      return interval;
    }
  }
  return nullptr;
}

StashedIntervalPtr StashBooks::latest_away(std::int64_t number) const {
  for (auto at = saved_.lower_bound(number); at != saved_.begin();) {
    --at;
    StashedIntervalPtr interval = at->second.lock();
    if (interval && interval->host && !interval->held && interval->lent.use_count() == 0) {
      return interval;
    }
  }
  return nullptr;
}

void StashBooks::left(const StashedIntervalPtr& interval, ArenaRegionPtr host) {
  c10::Storage gone;
  const Lock lock(mutex_);
  statistics.to_host_bytes += host->bytes();
  if (!interval) {
    return;
  }
  interval->host = std::move(host);
  if (!has_room(0) || !budget_) {
    gone = let_go(*interval);
  }
}

void StashBooks::forget(StashedInterval& interval) noexcept {
  c10::Storage gone;
  const Lock lock(mutex_);
  gone = let_go(interval);
  const bool failed = interval.leaving && interval.leaving->finished() && !interval.host;
  statistics.stayed += failed && !interval.stays ? 1 : 0;
  saved_.erase(interval.number);
  for (c10::StorageImpl* storage : interval.known_by) {
    const auto found = known_.find(storage);
    if (found != known_.end()) {
      std::erase_if(found->second, [](const auto& other) { return other.expired(); });
      if (found->second.empty()) {
        known_.erase(found);
      }
    }
  }
  if (saved_.empty()) {
    last_pass_bytes_ = std::exchange(pass_bytes_, 0);
  }
}

}  // namespace hydra
