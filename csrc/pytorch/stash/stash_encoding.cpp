// What becomes of intervals that may be encoded: when, and how long their streams are.
#include <ATen/ops/clone.h>
#include <c10/core/StreamGuard.h>

#include <utility>

#include "csrc/pytorch/stash/stash.h"
#include "csrc/pytorch/threads/gil.h"

namespace hydra {

namespace {

using Lock = StashBooks::Lock;

/// A GPU's kernels take memory from multiples of 16 bytes on.
bool can_encode(const DeviceBytes& from) {
  constexpr std::uintptr_t kMultiple = 16;
  return from.device.is_cpu() || reinterpret_cast<std::uintptr_t>(from.data) % kMultiple == 0;
}

/// Null if there is none.
const char* reason_against(const Encoded& encoded, Bytes bytes) {
  if (!encoded.stream.defined()) {
    return "an index outside its window";
  }
  const bool is_known = !encoded.header.defined();
  return is_known && encoded.length() > bytes / 16 * 15 ? "does not become smaller" : nullptr;
}

}  // namespace

void Stash::decide() {
  for (;;) {
    const auto [interval, is_made] = next_to_decide();
    if (!interval) {
      return;
    }
    if (!is_made) {
      encode(interval);
    }
    bool leaves = false;
    {
      const Lock lock(books_->mutex());
      leaves = interval->leaves_at_once && (is_made || interval->state != IntervalState::kMaking);
    }
    if (leaves) {
      begin_leaving(interval);
    } else if (is_made) {
      finish(interval);
    }
  }
}

std::pair<StashedIntervalPtr, bool> Stash::next_to_decide() {
  constexpr std::size_t kInMaking = 3;
  const Lock lock(books_->mutex());
  for (; !in_making_.empty(); in_making_.pop_front()) {
    StashedIntervalPtr oldest = lock.look_at(in_making_.front());
    if (!oldest || oldest->state != IntervalState::kMaking) {
      continue;
    }
    if (!oldest->made->reached() && in_making_.size() <= kInMaking) {
      break;
    }
    in_making_.pop_front();
    return {std::move(oldest), true};
  }
  for (; !undecided_.empty(); undecided_.pop_front()) {
    StashedIntervalPtr oldest = lock.look_at(undecided_.front());
    if (!oldest) {
      continue;
    }
    if (books_->is_newest(*oldest)) {
      break;
    }
    undecided_.pop_front();
    return {std::move(oldest), false};
  }
  return {};
}

bool Stash::encode(const StashedIntervalPtr& interval) {
  CoderPtr coder;
  c10::Storage storage;
  DeviceBytes from;
  {
    const Lock lock(books_->mutex());
    if (interval->state != IntervalState::kOnDevice || interval->coder) {
      return false;
    }
    coder = interval->wishes.coder(device_, interval->raw_bytes);
    storage = interval->held;
    from = {static_cast<const std::byte*>(storage.data()) + interval->held_begin, interval->raw_bytes, device_};
    if (!coder || !can_encode(from)) {
      return false;
    }
    interval->advance(IntervalState::kOnDevice, IntervalState::kEncoding);
  }
  Encoded encoded;
  FencePtr made;
  const char* refusal = "it could not be encoded";
  try {
    const c10::OptionalStreamGuard on(interval->saved_on);
    encoded = coder->encode(from, room_);
    made = encoded.header.defined() ? backend_->record() : nullptr;
    refusal = reason_against(encoded, interval->raw_bytes);
  } catch (const c10::OutOfMemoryError&) {
    refusal = "no memory to encode it in";
  } catch (...) {  // re-raised
    settle(interval, refusal);
    throw;
  }
  if (refusal != nullptr) {
    settle(interval, refusal);
    return false;
  }
  c10::Storage gone;
  const Lock lock(books_->mutex());
  const Bytes length = made ? encoded.stream.numel() : encoded.length();
  gone = books_->become_stream(interval, std::move(coder), encoded.stream.storage(), length);
  interval->advance(IntervalState::kEncoding, made ? IntervalState::kMaking : IntervalState::kOnDevice);
  if (made) {
    interval->in_making = std::move(encoded);
    interval->made = std::move(made);
    in_making_.push_back(interval);
  } else {
    interval->wishes.count(interval->raw_bytes, length);
  }
  return true;
}

void Stash::settle(const StashedIntervalPtr& interval, const char* refusal) {
  const Lock lock(books_->mutex());
  interval->advance(IntervalState::kEncoding, IntervalState::kOnDevice);
  interval->wishes.encodable = false;
  interval->wishes.exact_for = refusal;
}

void Stash::finish(const StashedIntervalPtr& interval) {
  const auto made_of = [&]() -> std::pair<std::optional<Encoded>, FencePtr> {
    const Lock lock(books_->mutex());
    return {interval->in_making, interval->made};
  };
  if (!made_of().first) {
    return;
  }
  const auto alone = lock_without_gil(finishing_);
  const auto [encoded, made] = made_of();
  if (!encoded) {
    return;
  }
  {
    const ReleaseGilIfHeld released;
    made->wait();
  }
  Bytes length = 0;
  at::Tensor exact = encoded->stream;
  try {
    length = encoded->length();
    const c10::OptionalStreamGuard on(interval->saved_on);
    exact = encoded->stream.narrow(0, 0, length).clone();
  } catch (const c10::OutOfMemoryError&) {  // it stays in the memory that it was made in
  } catch (...) {                           // re-raised, once
    const Lock lock(books_->mutex());
    interval->in_making.reset();
    interval->advance(IntervalState::kMaking, IntervalState::kOnDevice);
    throw;
  }
  c10::Storage gone;
  const Lock lock(books_->mutex());
  gone = books_->shorten(interval, exact.storage(), length);
  interval->wishes.count(interval->raw_bytes, length);
  interval->in_making.reset();
  interval->made = nullptr;
  interval->advance(IntervalState::kMaking, IntervalState::kOnDevice);
}

}  // namespace hydra
