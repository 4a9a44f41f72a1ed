#include "csrc/pytorch/stash/stash_books.h"

#include <algorithm>
#include <string>

#include "csrc/base/errors.h"

namespace hydra {

namespace {

constexpr Bytes kShareOfPass = 8;

bool may_advance(IntervalState from, IntervalState to) noexcept {
  using enum IntervalState;
  switch (from) {
    case kResident:
    case kMaking:
      return to == kOnDevice;
    case kOnDevice:
      return to == kEncoding || to == kLeaving;
    case kEncoding:
      return to == kMaking || to == kOnDevice;
    case kLeaving:
      return to == kCopied || to == kStranded;
    case kCopied:
      return to == kAway;
    case kAway:
      return to == kReturning;
    case kReturning:
      return to == kCopied || to == kAway;
    case kStranded:
      return false;
  }
  return false;
}

}  // namespace

const char* name_of(IntervalState state) noexcept {
  using enum IntervalState;
  switch (state) {
    case kResident:
      return "kResident";
    case kOnDevice:
      return "kOnDevice";
    case kEncoding:
      return "kEncoding";
    case kMaking:
      return "kMaking";
    case kLeaving:
      return "kLeaving";
    case kStranded:
      return "kStranded";
    case kCopied:
      return "kCopied";
    case kAway:
      return "kAway";
    case kReturning:
      return "kReturning";
  }
  return "?";
}

StashedInterval::~StashedInterval() { books->forget(*this); }

void StashedInterval::advance(IntervalState from, IntervalState to) {
  HYDRA_EXPECT(state == from && may_advance(from, to), StateError,
               std::string("internal error: a saved tensor in state ") + name_of(state) + " was to go from " +
                   name_of(from) + " to " + name_of(to));
  state = to;
}

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
        interval->data == storage.data() && (!interval->is_sealed() || interval->wishes.grant(wishes))) {
      return interval;
    }
  }
  return nullptr;
}

StashedIntervalPtr StashBooks::enter(const c10::Storage& storage, Bytes begin, Bytes bytes, Bytes lead,
                                     VersionMark mark, Wishes wishes, bool resident) {
  auto interval = std::make_shared<StashedInterval>(shared_from_this(), numbered_++, bytes, lead, mark,
                                                    resident ? IntervalState::kResident : IntervalState::kOnDevice);
  interval->wishes = std::move(wishes);
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
  interval->advance(IntervalState::kResident, IntervalState::kOnDevice);
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
  if (interval->state == IntervalState::kResident) {
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
  if (interval.held && interval.state != IntervalState::kResident && !interval.asked_for) {
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
  if (interval.state == IntervalState::kResident) {
    statistics.resident_bytes -= interval.bytes;
  } else {
    held_.erase(interval.number);
    statistics.held_bytes -= interval.bytes;
    asked_for_bytes_ -= std::exchange(interval.asked_for, false) ? interval.bytes : 0;
  }
  return std::exchange(interval.held, c10::Storage());
}

c10::Storage StashBooks::free_copied(StashedInterval& interval) {
  interval.advance(interval.state, IntervalState::kAway);  // legal for these alone
  return let_go(interval);
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
    if (!interval || interval->state == IntervalState::kEncoding || interval->state == IntervalState::kStranded ||
        (in_backward && interval->asked_for)) {
      continue;
    }
    if (interval->state != IntervalState::kLeaving) {
      return interval;
    }
    if (interval->leaving && interval->leaving->finished()) {  // it has failed
      interval->advance(IntervalState::kLeaving, IntervalState::kStranded);
      ++statistics.stayed;
    } else if (interval->leaving) {
      return interval;
    }
  }
  return nullptr;
}

StashedIntervalPtr StashBooks::latest_away(const Lock& lock, std::int64_t number) const {
  for (auto at = saved_.lower_bound(number); at != saved_.begin();) {
    --at;
    StashedIntervalPtr interval = lock.look_at(at->second);
    if (interval && interval->state == IntervalState::kAway && interval->lent.use_count() == 0) {
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
  interval->advance(IntervalState::kLeaving, IntervalState::kCopied);
  if (!has_room(0) || !budget_) {
    gone = free_copied(*interval);
  }
}

void StashBooks::forget(StashedInterval& interval) noexcept {
  c10::Storage gone;
  const Lock lock(mutex_);
  gone = let_go(interval);
  using enum IntervalState;
  const bool failed = interval.state == kLeaving && interval.leaving && interval.leaving->finished();
  statistics.stayed += failed ? 1 : 0;
  saved_.erase(interval.number);
  Part& part = parts[interval.part];
  if (interval.coder) {
    part.encoded += interval.raw_bytes;
    part.streams += interval.bytes;
  } else {
    (interval.state == kResident || interval.state == kOnDevice ? part.stayed : part.moved) += interval.raw_bytes;
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
