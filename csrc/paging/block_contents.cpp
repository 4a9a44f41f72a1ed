#include "csrc/paging/block_contents.h"

#include <exception>
#include <utility>

#include "csrc/base/errors.h"

namespace hydra {

void BlockContents::invalidate(std::int32_t index) {
  table_.home().expect_here();
  PagedBlock& block = table_.at(index);
  BlockPlace& place = block.place;
  BlockTable::Lock lock = table_.lock();
  while (place.state() == BlockState::kLoading || place.state() == BlockState::kReserving) {
    const TicketPtr ticket = place.ticket();
    if (place.state() == BlockState::kReserving || !ticket) {
      table_.wait_for_change(lock);
      continue;
    }
    lock.unlock();
    ticket->wait_quietly();
    lock.lock();
    if (place.state() == BlockState::kLoading && place.ticket() == ticket) {
      place.become_stale();
    }
  }
  place.become_stale();
  block.truth.discard();
}

void BlockContents::note_written(std::int32_t index, const FencePtr& written) {
  const BlockTable::Lock lock = table_.lock();
  if (written) {
    table_.at(index).place.uses().note_written(written);
  }
}

void BlockContents::mark_dirty(std::int32_t index) {
  const BlockTable::Lock lock = table_.lock();
  table_.at(index).truth.note_write();
}

void BlockContents::write_back_dirty() {
  table_.home().expect_here();
  struct UnderWay {
    PagedBlock* block;
    std::int64_t writes;
    TicketPtr ticket;
  };
  std::vector<UnderWay> under_way;
  under_way.reserve(table_.all().size());
  const FencePtr fence = backend_.record();
  std::exception_ptr error;
  try {
    const BlockTable::Lock lock = table_.lock();
    if (table_.is_closed(lock)) {
      return;
    }
    for (const auto& block : table_.all()) {
      if (block->is_to_go_home()) {
        Job job = block->place.write_back();
        job.priority = Priority::kFault;
        job.label = {.block = block->index, .part = "written back"};
        job.fences = block->place.uses().fences();  // including other threads' compute
        job.fences.push_back(fence);
        const Bytes bytes = job.bytes();
        under_way.push_back({block.get(), block->truth.writes(), backend_.to_host().submit(std::move(job))});
        PagerStatistics& statistics = table_.statistics(lock);
        statistics.written_back_bytes += bytes;
        ++statistics.write_backs;
      }
    }
  } catch (...) {  // re-raised at the end
    error = std::current_exception();
  }
  // All are waited for, even if one has failed: until they end, the lane writes the host.
  for (const auto& [block, writes, ticket] : under_way) {
    ticket->wait_quietly();
    if (std::exception_ptr failure = ticket->error()) {
      error = error ? error : failure;
      continue;
    }
    const BlockTable::Lock lock = table_.lock();
    block->truth.note_written_back(writes);  // another thread may have written meanwhile
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

void BlockContents::settle(std::int32_t index, Bytes beside) {
  const BlockTable::Lock lock = table_.lock();
  PagedBlock& block = table_.at(index);
  HYDRA_EXPECT(block.place.state() == BlockState::kPresent && block.pins > 0, StateError,
               "block '" + block.name + "' cannot settle: acquire it first");
  block.truth.settle(beside);
}

bool BlockContents::unsettle(std::int32_t index, std::int64_t writes) noexcept {
  const BlockTable::Lock lock = table_.lock();
  PagedBlock& block = *table_.all()[static_cast<std::size_t>(index)];
  return block.truth.unsettle(writes, block.pins > 0);
}

std::int32_t BlockContents::last_needed_settled() const {
  const BlockTable::Lock lock = table_.lock();
  const PagedBlock* last = nullptr;
  for (const auto& block : table_.all()) {
    if (block->truth.is_settled() && (last == nullptr || block->outlook.next_use > last->outlook.next_use)) {
      last = block.get();
    }
  }
  return last == nullptr ? -1 : last->index;
}

SlotContents BlockContents::of(std::int32_t index) const {
  const BlockTable::Lock lock = table_.lock();
  const PagedBlock& block = table_.at(index);
  // A caller pins the block and calls mark_dirty() before it writes: while there are pins, a write may be under way.
  return {block.place.memory(), block.place.uses().fences(), block.pins > 0 ? -1 : block.truth.writes()};
}

}  // namespace hydra
