#include "csrc/pytorch/stash/stash_books.h"

#include <algorithm>

namespace hydra {

namespace {

constexpr Bytes kShareOfPass = 8;

}  // namespace

StashedInterval::~StashedInterval() { books->forget(*this); }

StashedIntervalPtr StashBooks::find(const Lock& lock, const c10::Storage& storage, Bytes begin, Bytes end,
                                    VersionMark mark, const Wishes& wishes) const {
  const auto found = known_.find(storage.unsafeGetStorageImpl());
  if (found == known_.end() || mark.counter == nullptr) {
    return nullptr;
  }
  for (const std::weak_ptr<StashedInterval>& known : found->second) {
    StashedIntervalPtr interval = lock.look_at(known);
    // The counter cannot be another one at the same address: the interval's tensors have theirs, as this one has.
    if (interval && interval->saved_at == mark && interval->begin <= begin &&
        end <= interval->begin + interval->raw_bytes && interval->storage == storage.unsafeGetStorageImpl() &&
        interval->data == storage.data() && (!interval->sealed || interval->wishes.grant(wishes))) {
      return interval;
    }
  }
  return nullptr;
}

StashedIntervalPtr StashBooks::enter(const c10::Storage& storage, Bytes begin, Bytes bytes, Bytes lead,
                                     VersionMark mark, Wishes wishes, bool resident) {
  auto interval = std::make_shared<StashedInterval>(shared_from_this(), numbered_++, bytes, lead, mark);
  interval->wishes = std::move(wishes);
  interval->resident = resident;
  saved_[interval->number] = interval;
  ++statistics.intervals;
  statistics.saved_bytes += bytes;
  pass_.saved_bytes += bytes;
  lend(interval, storage, begin);
  if (!resident) {
    plan(*interval);
  }
  hold(interval, storage, begin);
  return interval;
}

void StashBooks::plan(StashedInterval& interval) {
  const Bytes before = pass_.form_bytes;
  const Bytes known = last_pass_ ? last_pass_->form_bytes : 0;
  // What comes from here on, as far as the last pass tells; if this one is the longer one, what there is.
  const Bytes to_come = before < known ? known - before : before + interval.raw_bytes;
  interval.leaves_at_once = !budget_ || !last_pass_ || to_come > *budget_;
  interval.encodes_at_once = !budget_ || !last_pass_ || last_pass_->raw_bytes > *budget_;
  pass_.raw_bytes += interval.raw_bytes;
  pass_.form_bytes += interval.raw_bytes;
  largest_ = std::max(largest_, interval.raw_bytes);
}

void StashBooks::end_residence(const StashedIntervalPtr& interval) {
  c10::Storage held = let_go(*interval);
  interval->resident = false;
  plan(*interval);
  hold(interval, std::move(held), interval->held_begin);
}

void StashBooks::lend(const StashedIntervalPtr& interval, const c10::Storage& storage, Bytes begin) {
  auto* const impl = storage.unsafeGetStorageImpl();
  if (std::ranges::find(interval->known_by, impl) == interval->known_by.end()) {
    interval->known_by.push_back(impl);
    known_[impl].push_back(interval);
  }
  interval->lent = storage.getWeakStorageImpl();
  interval->storage = impl;
  interval->data = storage.data();
  interval->begin = begin;
}

c10::Storage StashBooks::alive(const StashedInterval& interval) const {
  if (interval.held && !interval.coder) {
    return interval.held;
  }
  c10::intrusive_ptr<c10::StorageImpl> lent = interval.lent.lock();
  // Others may have given it other memory.
  return lent && lent->data() == interval.data ? c10::Storage(std::move(lent)) : c10::Storage();
}

void StashBooks::hold(const StashedIntervalPtr& interval, c10::Storage storage, Bytes begin) {
  interval->held = std::move(storage);
  interval->held_begin = begin;
  if (interval->resident) {
    statistics.resident_bytes += interval->bytes;
  } else {
    held_[interval->number] = interval;
    statistics.held_bytes += interval->bytes;
    statistics.peak_held_bytes = std::max(statistics.peak_held_bytes, statistics.held_bytes);
  }
}

bool StashBooks::has_room(Bytes bytes) const noexcept {
  const Bytes wanted = statistics.held_bytes + bytes;
  return budget_ ? statistics.resident_bytes + wanted <= *budget_
                 : wanted <= std::max(2 * largest_, pass_bytes() / kShareOfPass);
}

bool StashBooks::may_come_ahead(Bytes bytes) const noexcept {
  return budget_ ? has_room(bytes)
                 : statistics.held_bytes - asked_for_bytes_ + bytes <= std::max(largest_, pass_bytes() / kShareOfPass);
}

void StashBooks::note_asked_for(StashedInterval& interval) noexcept {
  if (interval.held && !interval.resident && !interval.asked_for) {
    interval.asked_for = true;
    asked_for_bytes_ += interval.bytes;
  }
}

void StashBooks::note_peak() noexcept {
  pass_.peak_bytes = std::max(pass_.peak_bytes, statistics.held_bytes + statistics.resident_bytes);
}

c10::Storage StashBooks::let_go(StashedInterval& interval) {
  if (!interval.held) {
    return {};
  }
  if (interval.resident) {
    statistics.resident_bytes -= interval.bytes;
  } else {
    held_.erase(interval.number);
    statistics.held_bytes -= interval.bytes;
    asked_for_bytes_ -= std::exchange(interval.asked_for, false) ? interval.bytes : 0;
  }
  return std::exchange(interval.held, c10::Storage());
}

c10::Storage StashBooks::become_stream(const StashedIntervalPtr& interval, CoderPtr coder, const c10::Storage& stream,
                                       Bytes length) {
  c10::Storage before = let_go(*interval);
  ++statistics.encoded;
  statistics.encoded_bytes += interval->raw_bytes;
  statistics.stream_bytes += length;
  pass_.form_bytes += length - interval->bytes;
  interval->coder = std::move(coder);
  interval->bytes = length;
  hold(interval, stream, 0);
  return before;
}

c10::Storage StashBooks::shorten(const StashedIntervalPtr& interval, const c10::Storage& stream, Bytes length) {
  c10::Storage before = let_go(*interval);
  statistics.stream_bytes += length - interval->bytes;
  pass_.form_bytes += length - interval->bytes;
  interval->bytes = length;
  hold(interval, stream, 0);
  return before;
}

StashedIntervalPtr StashBooks::oldest_held(const Lock& lock, bool in_backward) {
  for (const auto& [number, known] : held_) {
    StashedIntervalPtr interval = lock.look_at(known);
    if (!interval || interval->being_encoded || interval->stays || (in_backward && interval->asked_for)) {
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

StashedIntervalPtr StashBooks::latest_away(const Lock& lock, std::int64_t number) const {
  for (auto at = saved_.lower_bound(number); at != saved_.begin();) {
    --at;
    StashedIntervalPtr interval = lock.look_at(at->second);
    if (interval && interval->host && !interval->held && interval->lent.use_count() == 0) {
      return interval;
    }
  }
  return nullptr;
}

void StashBooks::left(const StashedIntervalPtr& interval, ArenaRegionPtr host, Bytes bytes) {
  c10::Storage gone;
  const Lock lock(mutex_);
  statistics.to_host_bytes += bytes;
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
  Part& part = parts[interval.part];
  if (interval.coder) {
    part.encoded += interval.raw_bytes;
    part.streams += interval.bytes;
  } else {
    (interval.begun_to_leave ? part.moved : part.stayed) += interval.raw_bytes;
  }
  if (!interval.coder && !interval.wishes.exact_for.empty()) {
    Exact& counted = exact[interval.wishes.exact_for];
    ++counted.intervals;
    counted.bytes += interval.raw_bytes;
  }
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
    const std::int64_t next = pass_.number + 1;
    last_pass_ = std::exchange(pass_, StashPass{next});
  }
}

}  // namespace hydra
