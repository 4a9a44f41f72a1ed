#include "csrc/pytorch/stash/interval_index.h"

#include <algorithm>
#include <utility>

#include "csrc/base/errors.h"
#include "csrc/pytorch/stash/stashed_interval.h"

namespace hydra {

void StashFigures::leave_unread(UnreadLength length) {
  unread.push_back(std::move(length));
  while (!unread.empty() && unread.front().made->reached()) {
    count_length(unread.front());
    unread.pop_front();
  }
}

void StashFigures::count_length(const UnreadLength& length) {
  Bytes bytes = length.made_bytes;
  try {
    bytes = length.read(length.header.const_data_ptr(), length.made_bytes);
  } catch (const Error&) {
    // The device reported an error, which was raised where the stream was read.
  }
  statistics.stream_bytes += bytes - length.made_bytes;
  parts[length.part].streams += bytes - length.made_bytes;
  length.wishes.count(length.saved_bytes, bytes);
}

StashedIntervalPtr IntervalIndex::Lock::look_at(const std::weak_ptr<StashedInterval>& known) const {
  StashedIntervalPtr interval = known.lock();
  if (interval) {
    seen_.push_back(interval);
  }
  return interval;
}

IntervalIndex::Entry IntervalIndex::enter(const c10::Storage& storage, Bytes begin, const SavedBytes& saved,
                                          Wishes wishes, Staying staying) {
  Entry entry;
  bool may_leave = false;  // since this call
  const Lock lock(*this);
  ++figures_.statistics.tensors;
  entry.interval = find(lock, storage, begin, saved, wishes);
  if (entry.interval) {
    may_leave = entry.interval->share(lock, wishes, staying);
  } else {
    entry.interval =
        std::make_shared<StashedInterval>(shared_from_this(), numbered_++, saved, std::move(wishes), staying);
    ++living_;
    ++figures_.statistics.intervals;
    figures_.statistics.saved_bytes += saved.bytes;
    room_.note_saved(saved.bytes);
    entry.interval->start(lock, storage, begin);
    may_leave = staying != Staying::kAlways;
  }
  entry.begin = entry.interval->begin_in_storage(lock);
  if (may_leave) {
    if (entry.interval->may_be_encoded_at_once(lock)) {
      undecided_.push_back(entry.interval);
    } else {
      entry.leaves = entry.interval->leaves_at_once(lock);
    }
  }
  entry.may_encode = may_leave && !(undecided_.empty() && in_making_.empty());
  entry.stays = !entry.may_encode && !entry.leaves && room_.has_room(0);
  if (entry.stays) {
    room_.note_peak();
  }
  return entry;
}

StashedIntervalPtr IntervalIndex::find(const Lock& lock, const c10::Storage& storage, Bytes begin,
                                       const SavedBytes& saved, const Wishes& wishes) const {
  const auto found = by_storage_.find(storage.unsafeGetStorageImpl());
  if (found == by_storage_.end() || saved.mark.counter == nullptr) {
    return nullptr;
  }
  for (const std::weak_ptr<StashedInterval>& known : found->second) {
    StashedIntervalPtr interval = lock.look_at(known);
    if (interval && interval->has(lock, storage, begin, saved, wishes)) {
      return interval;
    }
  }
  return nullptr;
}

IntervalIndex::EncodingTurn IntervalIndex::next_to_encode() {
  constexpr std::size_t kInMaking = 3;
  const Lock lock(*this);
  for (; !in_making_.empty(); in_making_.pop_front()) {
    StashedIntervalPtr oldest = lock.look_at(in_making_.front());
    if (!oldest || !oldest->is_in_making(lock)) {
      continue;
    }
    if (!oldest->is_made(lock) && in_making_.size() <= kInMaking) {
      break;
    }
    in_making_.pop_front();
    return {.interval = oldest, .is_made = true, .leaves_at_once = oldest->leaves_at_once(lock)};
  }
  for (; !undecided_.empty(); undecided_.pop_front()) {
    StashedIntervalPtr oldest = lock.look_at(undecided_.front());
    if (!oldest) {
      continue;
    }
    if (oldest->number() == numbered_ - 1) {
      break;
    }
    undecided_.pop_front();
    return {.interval = oldest, .is_made = false, .leaves_at_once = oldest->leaves_at_once(lock)};
  }
  return {};
}

std::optional<IntervalIndex::RoomStep> IntervalIndex::next_for_room(Bytes bytes, bool in_backward) {
  const Lock lock(*this);
  if (room_.has_room(bytes)) {
    return std::nullopt;
  }
  for (const bool leaves_anyway : {true, false}) {
    for (const auto& [number, known] : held_) {
      const StashedIntervalPtr interval = lock.look_at(known);
      const bool is_next = interval && interval->leaves_anyway(lock) == leaves_anyway;
      std::optional<RoomStep> step = is_next ? interval->make_room(lock, in_backward) : std::nullopt;
      if (step) {
        return step;
      }
    }
  }
  return std::nullopt;
}

TicketPtr IntervalIndex::next_to_release() {
  const Lock lock(*this);
  drop_released(lock);
  return releasing_.empty() ? nullptr : releasing_.front();
}

void IntervalIndex::drop_released(const Lock& /*lock*/) noexcept {
  while (!releasing_.empty() && releasing_.front()->finished()) {
    releasing_.pop_front();
  }
}

std::optional<IntervalIndex::RoomStep> IntervalIndex::next_to_give_up() {
  const Lock lock(*this);
  using enum StashedInterval::Reader;
  for (const bool stays_longest : {false, true}) {
    for (const StashedInterval::Reader last : {kNone, kGone, kMayBeThere}) {
      for (const auto& [number, known] : held_) {
        const StashedIntervalPtr interval = lock.look_at(known);
        const bool is_next =
            interval && interval->reader(lock) == last && interval->stays_longest(lock) == stays_longest;
        if (std::optional<RoomStep> step = is_next ? interval->give_up(lock) : std::nullopt) {
          return step;
        }
      }
    }
  }
  return std::nullopt;
}

StashedIntervalPtr IntervalIndex::next_to_return(std::int64_t number) const {
  const Lock lock(*this);
  for (auto at = away_.lower_bound(number); at != away_.begin();) {
    --at;
    StashedIntervalPtr interval = lock.look_at(at->second);
    if (interval && interval->is_on_host_alone(lock)) {
      return room_.may_come_ahead(interval->form_bytes(lock)) ? interval : nullptr;
    }
  }
  return nullptr;
}

void IntervalIndex::note_left(const StashedIntervalPtr& interval, StoredCopyPtr copy, Bytes bytes) {
  c10::Storage freed;
  const Lock lock(*this);
  figures_.statistics.to_host_bytes += bytes;
  if (interval) {
    freed = interval->note_left(lock, std::move(copy));
  }
}

void IntervalIndex::note_held(const Lock& /*lock*/, const StashedIntervalPtr& interval) {
  if (auto back = away_.extract(interval->number())) {
    held_.insert(std::move(back));
  } else {
    held_[interval->number()] = interval;
  }
}

void IntervalIndex::note_freed(const Lock& lock, const StashedInterval& interval) noexcept {
  auto freed = held_.extract(interval.number());
  if (freed && interval.is_away(lock)) {
    away_.insert(std::move(freed));
  }
}

void IntervalIndex::note_releasing(const Lock& lock, TicketPtr transfer) {
  drop_released(lock);
  releasing_.push_back(std::move(transfer));
}

void IntervalIndex::note_storage(const Lock& /*lock*/, c10::StorageImpl* storage, const StashedIntervalPtr& interval) {
  by_storage_[storage].push_back(interval);
}

void IntervalIndex::await_length(const Lock& /*lock*/, const StashedIntervalPtr& interval) {
  in_making_.push_back(interval);
}

void IntervalIndex::forget(const Lock& /*lock*/, const StashedInterval& interval,
                           c10::ArrayRef<c10::StorageImpl*> storages) noexcept {
  away_.erase(interval.number());
  for (c10::StorageImpl* storage : storages) {
    const auto found = by_storage_.find(storage);
    if (found != by_storage_.end()) {
      auto& known = found->second;
      known.erase(std::ranges::remove_if(known, [](const auto& other) { return other.expired(); }).begin(),
                  known.end());
      if (known.empty()) {
        by_storage_.erase(found);
      }
    }
  }
  if (--living_ == 0) {
    room_.end_pass();
  }
}

}  // namespace hydra
