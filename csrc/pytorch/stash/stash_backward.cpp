// The half of a stash that backward asks.
#include <ATen/ops/empty.h>

#include <utility>

#include "csrc/base/clock.h"
#include "csrc/pytorch/stash/stash.h"
#include "csrc/pytorch/threads/error_bridge.h"
#include "csrc/pytorch/threads/gil.h"

namespace hydra {

namespace {

using Lock = StashBooks::Lock;

}  // namespace

at::Tensor Stash::unpack(SavedTensor& saved) {
  saved.expect_unchanged();
  if (saved.kept_.defined()) {
    return saved.kept_;
  }
  room_.clear();  // of use in forward alone, and no small part of what there is
  const auto [storage, begin] = fetched(saved);
  prefetch(saved.interval_->number);
  return saved.over(storage, begin);
}

std::pair<c10::Storage, Bytes> Stash::fetched(SavedTensor& saved) {
  const StashedIntervalPtr& interval = saved.interval_;
  c10::Storage storage;  // from one attempt to the next: what another thread lets go meanwhile stays
  for (;;) {
    c10::Storage before;
    c10::Storage gone;
    c10::Storage stream;
    TicketPtr arriving;
    {
      const Lock lock(books_->mutex());
      before = std::exchange(storage, books_->alive(*interval));
      if (interval->coder) {
        stream = storage ? c10::Storage() : interval->held;
        arriving = stream ? interval->arriving : nullptr;
      } else {
        arriving = storage ? interval->arriving : nullptr;
      }
      if (storage && !arriving) {
        interval->waiting -= saved.taken_ ? 0 : 1;
        saved.taken_ = true;
        if (interval->waiting == 0 && interval->is_copied()) {
          gone = books_->free_copied(*interval);  // the caller has it
        }
        books_->note_asked_for(*interval);
        return {storage, interval->begin};
      }
    }
    if (arriving) {
      await(interval, *arriving);
    } else if (stream) {
      storage = decode(interval, stream);
    } else {
      make_room(interval->bytes, /*in_backward=*/true);
      storage = bring(interval, Priority::kFault);  // or a stream, which serves as well to keep it
    }
  }
}

void Stash::await(const StashedIntervalPtr& interval, Ticket& arriving) {
  const Clock::time_point start = Clock::now();
  c10::Storage gone;
  std::exception_ptr error;
  try {
    const ReleaseGilIfHeld released;
    backend_->compute_waits(arriving);
  } catch (...) {  // re-raised below, once the next attempt can begin anew
    error = std::current_exception();
  }
  {
    const Lock lock(books_->mutex());
    books_->statistics.backward_wait_seconds += seconds_since(start);
    if (interval->arriving.get() == &arriving) {
      interval->arriving = nullptr;
      if (error) {
        interval->data = nullptr;
      }
      if (interval->state == IntervalState::kReturning) {  // otherwise freed since
        if (error) {
          gone = books_->free_copied(*interval);
        } else {
          interval->advance(IntervalState::kReturning, IntervalState::kCopied);
        }
      }
    }
  }
  if (error) {
    try {
      std::rethrow_exception(error);
    } catch (...) {  // re-raised as what Python knows
      rethrow_for_torch("");
      throw;
    }
  }
}

c10::Storage Stash::bring(const StashedIntervalPtr& interval, Priority priority) {
  const Bytes lead = interval->coder ? 0 : interval->lead;  // it is on the host, and so does not change
  const Bytes bytes = interval->bytes;
  const at::Tensor memory = at::empty({lead + bytes}, at::TensorOptions(at::kByte).device(device_));
  const c10::Storage& storage = memory.storage();
  FencePtr computed;
  {
    const ReleaseGilIfHeld released;
    computed = backend_->record();
  }
  const Lock lock(books_->mutex());
  if (interval->state != IntervalState::kAway) {
    return interval->held;  // another thread was faster
  }
  Job job;
  job.priority = priority;
  job.segments = {{static_cast<std::byte*>(storage.mutable_data()) + lead, interval->host->data(), bytes}};
  job.fences = {std::move(computed)};
  job.after = [books = books_, storage, host = interval->host, bytes] {
    const Lock counting(books->mutex());
    books->statistics.to_device_bytes += bytes;
  };
  TicketPtr arriving = backend_->to_device().submit(std::move(job));  // if it throws, nothing has changed
  if (!interval->coder) {
    books_->lend(interval, storage, lead);
  }
  interval->advance(IntervalState::kAway, IntervalState::kReturning);
  books_->hold(interval, storage, lead);
  interval->arriving = std::move(arriving);
  books_->statistics.prefetched += priority == Priority::kPrefetch ? 1 : 0;
  return storage;
}

c10::Storage Stash::decode(const StashedIntervalPtr& interval, const c10::Storage& stream) {
  CoderPtr coder;
  DeviceBytes from;
  {
    const Lock lock(books_->mutex());
    coder = interval->coder;
    from = {stream.data(), interval->bytes, device_};
  }
  const at::Tensor memory =
      at::empty({interval->lead + interval->raw_bytes}, at::TensorOptions(at::kByte).device(device_));
  coder->decode(from, static_cast<std::byte*>(memory.mutable_data_ptr()) + interval->lead, room_);
  const Lock lock(books_->mutex());
  books_->lend(interval, memory.storage(), interval->lead);
  return memory.storage();
}

void Stash::prefetch(std::int64_t before) {
  for (;;) {
    StashedIntervalPtr next;
    {
      const Lock lock(books_->mutex());
      next = books_->latest_away(lock, before);
      if (!next || !books_->may_come_ahead(next->bytes)) {
        return;
      }
    }
    before = next->number;
    try {
      bring(next, Priority::kPrefetch);
    } catch (const c10::OutOfMemoryError&) {
      return;  // it comes when it is needed
    }
  }
}

}  // namespace hydra
