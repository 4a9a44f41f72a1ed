#include "csrc/pytorch/stash/stashed_interval.h"

#include <algorithm>
#include <string>
#include <utility>

#include "csrc/base/errors.h"

namespace hydra {

namespace {

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

/// The kernels of a GPU need memory that begins at a multiple of 16 bytes.
bool can_encode(const DeviceBytes& from) {
  constexpr std::uintptr_t kMultiple = 16;
  return from.device.is_cpu() || reinterpret_cast<std::uintptr_t>(from.data) % kMultiple == 0;
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

StashedInterval::StashedInterval(std::shared_ptr<IntervalIndex> index, std::int64_t number, const SavedBytes& saved,
                                 Wishes wishes, Staying staying)
    : index_(std::move(index)),
      number_(number),
      saved_(saved),
      state_(staying == Staying::kAlways ? kResident : kOnDevice),
      wishes_(std::move(wishes)),
      plan_{.staying = staying},
      form_{.bytes = saved.bytes} {}

StashedInterval::~StashedInterval() {
  c10::Storage freed;
  const Lock lock(*index_);
  freed = free(lock);
  count_outcome(lock);
  if (making_) {
    Encoded& encoded = making_->encoded;
    index_->figures(lock).leave_unread({.header = std::move(encoded.header),
                                        .read = encoded.read,
                                        .made_bytes = encoded.stream.numel(),
                                        .made = std::move(making_->made),
                                        .saved_bytes = saved_.bytes,
                                        .part = saved_.part,
                                        .wishes = std::move(wishes_)});
  }
  index_->forget(lock, *this, elsewhere_.found_by);
}

void StashedInterval::count_outcome(const Lock& lock) const {
  StashFigures& figures = index_->figures(lock);
  const bool has_failed = state_ == kLeaving && leaving_ && leaving_->finished();
  figures.statistics.stayed += has_failed ? 1 : 0;
  StashPart& part = figures.parts[saved_.part];
  if (form_.coder) {
    part.encoded += saved_.bytes;
    part.streams += form_.bytes;
    return;
  }
  (state_ == kResident || state_ == kOnDevice ? part.stayed : part.moved) += saved_.bytes;
  if (!wishes_.exact_for.empty()) {
    StashExact& exact = figures.exact[wishes_.exact_for];
    ++exact.intervals;
    exact.bytes += saved_.bytes;
  }
}

void StashedInterval::advance(const Lock& /*lock*/, IntervalState from, IntervalState to) {
  HYDRA_EXPECT(state_ == from && may_advance(from, to), StateError,
               std::string("internal error: a saved tensor in state ") + name_of(state_) + " was to go from " +
                   name_of(from) + " to " + name_of(to));
  state_ = to;
}

// ---- memory ---------------------------------------------------------------------------------------------------------
void StashedInterval::start(const Lock& lock, const c10::Storage& storage, Bytes begin) {
  readers_.waiting = 1;
  note_elsewhere(lock, storage, begin);
  if (state_ != kResident) {
    plan_ = index_->room(lock).plan(saved_.bytes, plan_.staying);
  }
  hold(lock, storage, begin);
}

bool StashedInterval::share(const Lock& lock, const Wishes& wishes, Staying staying) {
  ++readers_.waiting;
  wishes_.add(wishes);
  if (staying == Staying::kAlways) {
    return false;
  }
  if (state_ != kResident) {
    plan_.staying = std::max(plan_.staying, staying);
    return false;
  }
  c10::Storage held = free(lock);
  advance(lock, kResident, kOnDevice);
  plan_ = index_->room(lock).plan(saved_.bytes, staying);
  hold(lock, std::move(held), form_.begin);
  return true;
}

bool StashedInterval::has(const Lock& /*lock*/, const c10::Storage& storage, Bytes begin, const SavedBytes& saved,
                          const Wishes& wishes) const {
  // No other counter can have the same address, since the interval's saved tensors keep theirs alive.
  const bool is_same = saved_.mark == saved.mark && elsewhere_.storage == storage.unsafeGetStorageImpl() &&
                       elsewhere_.data == storage.data();
  const bool is_within = elsewhere_.begin <= begin && begin + saved.bytes <= elsewhere_.begin + saved_.bytes;
  const bool is_sealed = state_ == kEncoding || form_.coder;
  return is_same && is_within && (!is_sealed || wishes_.grant(wishes));
}

void StashedInterval::note_elsewhere(const Lock& lock, const c10::Storage& storage, Bytes begin) {
  auto* const impl = storage.unsafeGetStorageImpl();
  if (std::ranges::find(elsewhere_.found_by, impl) == elsewhere_.found_by.end()) {
    elsewhere_.found_by.push_back(impl);
    index_->note_storage(lock, impl, shared_from_this());
  }
  elsewhere_.alive = storage.getWeakStorageImpl();
  elsewhere_.storage = impl;
  elsewhere_.data = storage.data();
  elsewhere_.begin = begin;
}

c10::Storage StashedInterval::alive() const {
  if (form_.held && !form_.coder) {
    return form_.held;
  }
  c10::intrusive_ptr<c10::StorageImpl> alive = elsewhere_.alive.lock();
  // The owners may have replaced the storage's memory.
  return alive && alive->data() == elsewhere_.data ? c10::Storage(std::move(alive)) : c10::Storage();
}

void StashedInterval::hold(const Lock& lock, c10::Storage storage, Bytes begin) {
  form_.held = std::move(storage);
  form_.begin = begin;
  index_->room(lock).hold(form_.bytes, state_ == kResident);
  if (state_ != kResident) {
    index_->note_held(lock, shared_from_this());
  }
}

c10::Storage StashedInterval::free(const Lock& lock) noexcept {
  if (!form_.held) {
    return {};
  }
  index_->room(lock).free(form_.bytes, state_ == kResident, std::exchange(readers_.have_come, false));
  index_->note_freed(lock, *this);
  if (arriving_) {
    index_->note_releasing(lock, arriving_);
  }
  return std::exchange(form_.held, c10::Storage());
}

c10::Storage StashedInterval::free_copy(const Lock& lock) {
  advance(lock, state_, kAway);  // allowed only in states in which the host has the bytes too
  return free(lock);
}

// ---- encoding -------------------------------------------------------------------------------------------------------
std::optional<StashedInterval::Encodable> StashedInterval::begin_encoding(c10::Device device) {
  const Lock lock(*index_);
  if (state_ != kOnDevice || form_.coder) {
    return std::nullopt;
  }
  CoderPtr coder = wishes_.coder(device, saved_.bytes);
  const DeviceBytes from = {static_cast<const std::byte*>(form_.held.data()) + form_.begin, saved_.bytes, device};
  if (!coder || !can_encode(from)) {
    return std::nullopt;
  }
  advance(lock, kOnDevice, kEncoding);
  return Encodable{std::move(coder), form_.held, from};
}

void StashedInterval::refuse_encoding(const char* reason) {
  const Lock lock(*index_);
  advance(lock, kEncoding, kOnDevice);
  wishes_.encodable = false;
  wishes_.exact_for = reason;
}

void StashedInterval::become_stream(CoderPtr coder, Encoded encoded, FencePtr made) {
  const Bytes length = made ? encoded.stream.numel() : encoded.length();
  c10::Storage freed;
  const Lock lock(*index_);
  advance(lock, kEncoding, made ? kMaking : kOnDevice);
  freed = free(lock);
  StashStatistics& statistics = index_->figures(lock).statistics;
  ++statistics.encoded;
  statistics.encoded_bytes += saved_.bytes;
  statistics.stream_bytes += length;
  note_new_form(lock, length);
  form_.coder = std::move(coder);
  form_.bytes = length;
  hold(lock, encoded.stream.storage(), 0);
  if (made) {
    making_ = {std::move(encoded), std::move(made)};
    index_->await_length(lock, shared_from_this());
  } else {
    wishes_.count(saved_.bytes, length);
  }
}

void StashedInterval::note_new_form(const Lock& lock, Bytes bytes) noexcept {
  if (plan_.staying != Staying::kNever) {
    index_->room(lock).note_new_form(form_.bytes, bytes);
  }
}

std::optional<StashedInterval::Making> StashedInterval::making() const {
  const Lock lock(*index_);
  return making_;
}

void StashedInterval::end_making(std::optional<Stream> exact) {
  std::optional<Making> made;
  c10::Storage freed;
  const Lock lock(*index_);
  advance(lock, kMaking, kOnDevice);
  made.swap(making_);
  if (exact) {
    freed = free(lock);
    index_->figures(lock).statistics.stream_bytes += exact->length - form_.bytes;
    note_new_form(lock, exact->length);
    form_.bytes = exact->length;
    hold(lock, std::move(exact->storage), 0);
    wishes_.count(saved_.bytes, form_.bytes);
  }
}

// ---- leaving --------------------------------------------------------------------------------------------------------
std::optional<StashedInterval::Departure> StashedInterval::begin_leaving() {
  const Lock lock(*index_);
  if (state_ != kOnDevice) {
    return std::nullopt;
  }
  advance(lock, kOnDevice, kLeaving);
  return Departure{form_.held, form_.begin, form_.bytes};
}

void StashedInterval::leave_by(TicketPtr leaving) {
  const Lock lock(*index_);
  index_->note_releasing(lock, leaving);
  leaving_ = std::move(leaving);
}

void StashedInterval::strand() {
  const Lock lock(*index_);
  advance(lock, kLeaving, kStranded);
}

c10::Storage StashedInterval::note_left(const Lock& lock, StoredCopyPtr copy) {
  advance(lock, kLeaving, kCopied);
  form_.copy = std::move(copy);
  return index_->room(lock).keeps_copies() ? c10::Storage() : free_copy(lock);
}

std::optional<IntervalIndex::RoomStep> StashedInterval::make_room(const Lock& lock, bool in_backward) {
  const bool has_to_stay = state_ == kEncoding || state_ == kStranded || plan_.staying == Staying::kLongest;
  if (has_to_stay || (in_backward && readers_.have_come)) {
    return std::nullopt;
  }
  if (is_copied()) {
    return IntervalIndex::RoomStep{.freed = free_copy(lock), .awaited = nullptr, .departing = nullptr};
  }
  if (state_ != kLeaving) {
    return IntervalIndex::RoomStep{.freed = {}, .awaited = nullptr, .departing = shared_from_this()};
  }
  if (!leaving_) {  // another thread is about to submit it
    return std::nullopt;
  }
  if (leaving_->finished()) {  // it has failed
    advance(lock, kLeaving, kStranded);
    ++index_->figures(lock).statistics.stayed;
    return std::nullopt;
  }
  return IntervalIndex::RoomStep{.freed = {}, .awaited = leaving_, .departing = nullptr};
}

StashedInterval::Reader StashedInterval::reader(const Lock& /*lock*/) const noexcept {
  if (!readers_.have_come) {
    return Reader::kNone;
  }
  return form_.held.use_count() > 1 ? Reader::kMayBeThere : Reader::kGone;
}

std::optional<IntervalIndex::RoomStep> StashedInterval::give_up(const Lock& lock) {
  if (state_ == kReturning && arriving_ && !arriving_->finished()) {  // its memory is not free before
    return IntervalIndex::RoomStep{.freed = {}, .awaited = arriving_, .departing = nullptr};
  }
  if (is_copied()) {
    const bool was_ahead = !readers_.have_come;
    c10::Storage freed = free_copy(lock);
    if (was_ahead) {
      index_->room(lock).note_given_up();
    }
    return IntervalIndex::RoomStep{.freed = std::move(freed), .awaited = nullptr, .departing = nullptr};
  }
  if (state_ == kOnDevice && (form_.coder || !wishes_.encodable)) {
    return IntervalIndex::RoomStep{.freed = {}, .awaited = nullptr, .departing = shared_from_this()};
  }
  return std::nullopt;
}

// ---- coming back ----------------------------------------------------------------------------------------------------
StashedInterval::Reading StashedInterval::read(bool& taken) {
  c10::Storage freed;
  Reading reading;
  const Lock lock(*index_);
  reading.storage = alive();
  if (reading.storage) {
    reading.begin = elsewhere_.begin;
    reading.arriving = form_.coder ? nullptr : arriving_;
  } else if (form_.coder && form_.held) {
    reading.coder = form_.coder;
    reading.stream = form_.held;
    reading.stream_bytes = form_.bytes;
    reading.arriving = arriving_;
  }
  if (reading.is_done()) {
    readers_.waiting -= taken ? 0 : 1;
    taken = true;
    if (readers_.waiting == 0 && is_copied()) {
      freed = free_copy(lock);  // the caller owns the memory now
    }
    if (form_.held && state_ != kResident && !readers_.have_come) {
      readers_.have_come = true;
      index_->room(lock).note_asked_for(form_.bytes);
    }
  }
  return reading;
}

bool StashedInterval::is_on_host_alone(const Lock& /*lock*/) const noexcept {
  return state_ == kAway && elsewhere_.alive.use_count() == 0;
}

StashedInterval::Landing StashedInterval::landing() const {
  const Lock lock(*index_);
  return {.lead = form_.coder ? 0 : saved_.lead, .bytes = form_.bytes};
}

c10::Storage StashedInterval::begin_return(const c10::Storage& storage, bool is_ahead,
                                           const std::function<TicketPtr(StoredCopy& copy)>& submit) {
  const Lock lock(*index_);
  if (state_ != kAway) {
    return form_.held;
  }
  TicketPtr arriving = submit(*form_.copy);  // first: if it throws, nothing has changed
  const Bytes lead = form_.coder ? 0 : saved_.lead;
  if (!form_.coder) {
    note_elsewhere(lock, storage, lead);
  }
  advance(lock, kAway, kReturning);
  hold(lock, storage, lead);
  arriving_ = std::move(arriving);
  index_->figures(lock).statistics.prefetched += is_ahead ? 1 : 0;
  return storage;
}

void StashedInterval::end_return(const Ticket& arriving, bool has_failed) {
  c10::Storage freed;
  const Lock lock(*index_);
  if (arriving_.get() != &arriving) {
    return;
  }
  arriving_ = nullptr;
  if (has_failed) {
    elsewhere_.data = nullptr;
  }
  if (state_ == kReturning) {  // otherwise it was freed since
    if (has_failed) {
      freed = free_copy(lock);
    } else {
      advance(lock, kReturning, kCopied);
    }
  }
}

void StashedInterval::note_decoded(const c10::Storage& storage) {
  const Lock lock(*index_);
  note_elsewhere(lock, storage, saved_.lead);
}

}  // namespace hydra
