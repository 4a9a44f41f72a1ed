// The half of a stash that backward calls.
#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "csrc/base/clock.h"
#include "csrc/pytorch/stash/stash.h"
#include "csrc/pytorch/threads/error_bridge.h"
#include "csrc/pytorch/threads/gil.h"

namespace hydra {

using Lock = IntervalIndex::Lock;

at::Tensor Stash::unpack(SavedTensor& saved) {
  saved.expect_unchanged();
  if (saved.kept_.defined()) {
    return saved.kept_;
  }
  room_.clear();  // only forward needs this scratch memory, which is large
  const std::optional<c10::Stream> reader = compute_stream(device_);
  const std::optional<c10::Stream> saver = saved.interval_->saved().stream;
  std::pair<c10::Storage, Bytes> found;
  FencePtr there;
  {
    // Whatever the stash allocates, waits for and decodes is of the stream that saved; other streams follow it.
    const c10::OptionalStreamGuard on(saver);
    found = fetched(saved);
    if (reader != saver) {
      const ReleaseGilIfHeld released;
      there = backend_->record();
    }
    prefetch(saved.interval_->number());
  }
  if (there) {
    backend_->compute_follows(there);
    c10::impl::VirtualGuardImpl(device_.type()).recordDataPtrOnStream(found.first.data_ptr(), *reader);
  }
  return saved.over(found.first, found.second);
}

std::pair<c10::Storage, Bytes> Stash::fetched(SavedTensor& saved) {
  const StashedIntervalPtr& interval = saved.interval_;
  c10::Storage found;  // keeps memory alive from one attempt to the next, even if another thread frees it
  for (;;) {
    StashedInterval::Reading reading = interval->read(saved.taken_);
    if (reading.is_done()) {
      return {std::move(reading.storage), reading.begin};
    }
    found = std::move(reading.storage);
    if (reading.arriving) {
      await(*interval, *reading.arriving);
    } else if (reading.stream) {
      found = decode(*interval, reading);
    } else {
      make_room(interval->landing().bytes, /*in_backward=*/true);
      found = bring(interval, Priority::kFault);  // may be memory of a stream, which has to stay too
    }
  }
}

void Stash::await(StashedInterval& interval, Ticket& arriving) {
  const Clock::time_point start = Clock::now();
  std::exception_ptr error;
  try {
    const ReleaseGilIfHeld released;
    backend_->compute_waits(arriving);
  } catch (...) {  // re-raised below, once the interval allows another attempt
    error = std::current_exception();
  }
  {
    const Lock lock(*index_);
    index_->figures(lock).statistics.backward_wait_seconds += seconds_since(start);
  }
  interval.end_return(arriving, error != nullptr);
  if (error) {
    try {
      std::rethrow_exception(error);
    } catch (...) {  // re-raised as an error that Python knows
      rethrow_for_torch("");
      throw;
    }
  }
}

c10::Storage Stash::bring(const StashedIntervalPtr& interval, Priority priority) {
  const c10::OptionalStreamGuard on(interval->saved().stream);
  const auto [lead, bytes] = interval->landing();
  const at::Tensor memory = at::empty({lead + bytes}, at::TensorOptions(at::kByte).device(device_));
  const c10::Storage& storage = memory.storage();
  CopyTransfer transfer;
  transfer.device = static_cast<std::byte*>(storage.mutable_data()) + lead;
  transfer.bytes = bytes;
  transfer.owner = std::make_shared<c10::Storage>(storage);
  transfer.priority = priority;
  {
    const ReleaseGilIfHeld released;
    transfer.fence = backend_->record();
  }
  transfer.after = [index = index_, size = bytes] {
    const Lock lock(*index);
    index->figures(lock).statistics.to_device_bytes += size;
  };
  return interval->begin_return(storage, priority == Priority::kPrefetch, [&](StoredCopy& copy) {
    return copy.give(backend_->to_device(), std::move(transfer));
  });
}

c10::Storage Stash::decode(StashedInterval& interval, const StashedInterval::Reading& reading) {
  const Bytes lead = interval.saved().lead;
  const at::Tensor memory = at::empty({lead + interval.saved().bytes}, at::TensorOptions(at::kByte).device(device_));
  const DeviceBytes from{reading.stream.data(), reading.stream_bytes, device_};
  reading.coder->decode(from, static_cast<std::byte*>(memory.mutable_data_ptr()) + lead, room_);
  interval.note_decoded(memory.storage());
  return memory.storage();
}

void Stash::prefetch(std::int64_t before) {
  while (const StashedIntervalPtr next = index_->next_to_return(before)) {
    before = next->number();
    try {
      bring(next, Priority::kPrefetch);
    } catch (const c10::OutOfMemoryError&) {
      return;  // it comes when it is needed
    }
  }
}

}  // namespace hydra
