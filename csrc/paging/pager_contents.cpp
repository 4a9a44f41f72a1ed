// The part of the pager that tracks a block's bytes: which copy is the truth, and how it comes home.
#include <utility>

#include "csrc/base/errors.h"
#include "csrc/paging/pager.h"

namespace hydra {

void Pager::invalidate(std::int32_t index) {
  home_.expect_here();
  Block& block = at(index);
  std::unique_lock lock(mutex_);
  while (block.state == BlockState::kLoading || block.state == BlockState::kReserving) {
    const TicketPtr ticket = block.ticket;
    if (block.state == BlockState::kReserving || !ticket) {
      changed_->wait(lock);
      continue;
    }
    lock.unlock();
    ticket->wait_quietly();
    lock.lock();
    if (block.state == BlockState::kLoading && block.ticket == ticket) {
      block.state = BlockState::kStale;
    }
  }
  if (block.state == BlockState::kPresent) {
    block.client->withdraw();
    block.state = BlockState::kStale;
  }
  block.dirty = false;
}

void Pager::settle(std::int32_t index, Bytes beside) {
  const std::lock_guard lock(mutex_);
  Block& block = at(index);
  HYDRA_EXPECT(block.state == BlockState::kPresent && block.pins > 0, StateError,
               "block '" + block.name + "' cannot settle: acquire it first");
  block.settled = true;
  block.beside = beside;
}

bool Pager::unsettle(std::int32_t index, std::int64_t writes) noexcept {
  const std::lock_guard lock(mutex_);
  Block& block = *blocks_[static_cast<std::size_t>(index)];
  const bool written = block.dirty && block.writes != writes;
  if (written && block.pins == 0) {
    return false;  // no end of a window would bring the written bytes home
  }
  block.settled = false;
  block.dirty = written;
  block.beside = 0;
  return true;
}

std::int32_t Pager::last_needed_settled() const {
  const std::lock_guard lock(mutex_);
  const Block* last = nullptr;
  for (const auto& block : blocks_) {
    if (block->settled && (last == nullptr || block->next_use > last->next_use)) {
      last = block.get();
    }
  }
  return last == nullptr ? -1 : last->index;
}

SlotContents Pager::contents_of(std::int32_t index) const {
  const std::lock_guard lock(mutex_);
  const Block& block = at(index);
  // A caller pins the block and calls mark_dirty() before it writes: while there are pins, a write may be under way.
  return {block.slot, block.last_uses, block.pins > 0 ? -1 : block.writes};
}

void Pager::note_written(std::int32_t index, FencePtr written) {
  const std::lock_guard lock(mutex_);
  if (written) {
    at(index).last_uses.push_back(written);
    at(index).written = std::move(written);
  }
}

void Pager::mark_dirty(std::int32_t index) {
  const std::lock_guard lock(mutex_);
  at(index).dirty = true;
  ++at(index).writes;
}

void Pager::write_back_dirty() {
  home_.expect_here();
  struct UnderWay {
    Block* block;
    std::int64_t writes;
    TicketPtr ticket;
  };
  std::vector<UnderWay> under_way;
  const FencePtr fence = backend_.record();
  {
    const std::lock_guard lock(mutex_);
    if (closed_) {
      return;
    }
    for (const auto& block : blocks_) {
      // A pinned block may be written at this moment: it is written back after its release.
      if (block->dirty && block->pins == 0 && !block->settled && block->state == BlockState::kPresent) {
        Job job = block->client->write_back(block->slot);
        job.priority = Priority::kFault;
        job.label = {.block = block->index, .part = "written back"};
        job.fences = block->last_uses;  // including other threads' compute
        job.fences.push_back(fence);
        statistics_.written_back_bytes += job.bytes();
        ++statistics_.write_backs;
        under_way.push_back({block.get(), block->writes, backend_.to_host().submit(std::move(job))});
      }
    }
  }
  for (const auto& [block, writes, ticket] : under_way) {
    ticket->wait();
    const std::lock_guard lock(mutex_);
    block->dirty = block->dirty && block->writes != writes;  // another thread may have written meanwhile
  }
}

}  // namespace hydra
