#include "csrc/paging/block_place.h"

#include <string>
#include <utility>

#include "csrc/base/errors.h"

namespace hydra {

const char* name_of(BlockState state) noexcept {
  switch (state) {
    case BlockState::kAbsent:
      return "kAbsent";
    case BlockState::kReserving:
      return "kReserving";
    case BlockState::kLoading:
      return "kLoading";
    case BlockState::kPresent:
      return "kPresent";
    case BlockState::kStale:
      return "kStale";
  }
  return "?";
}

bool BlockPlace::can_give_up_slot() const noexcept {
  return state_ == BlockState::kPresent || state_ == BlockState::kStale ||
         (state_ == BlockState::kLoading && ticket_->finished());
}

void BlockPlace::advance(BlockState from, BlockState to) {
  HYDRA_EXPECT(state_ == from, StateError,
               std::string("internal error: a block in state ") + name_of(state_) + " was to go from " + name_of(from) +
                   " to " + name_of(to));
  state_ = to;
}

void BlockPlace::begin_reserving() { advance(BlockState::kAbsent, BlockState::kReserving); }

void BlockPlace::cancel_reserving() { advance(BlockState::kReserving, BlockState::kAbsent); }

void BlockPlace::land(Slot slot) {
  advance(BlockState::kReserving, BlockState::kStale);
  memory_ = slot.memory;
  uses_ = SlotUses(std::move(slot.fences));
  ticket_ = std::move(slot.ticket);
}

Bytes BlockPlace::begin_filling(Lane& to_device, Priority priority, std::int32_t block) {
  HYDRA_EXPECT(state_ == BlockState::kStale, StateError,
               std::string("internal error: a block in state ") + name_of(state_) + " was to be filled");
  Job job = client_->fill(memory_);
  job.priority = priority;
  job.label = {.block = block};
  job.fences = uses_.fences();
  const Bytes bytes = job.bytes();
  ticket_ = to_device.submit(std::move(job));
  advance(BlockState::kStale, BlockState::kLoading);
  return bytes;
}

void BlockPlace::note_filled(bool has_ended) {
  if (state_ == BlockState::kLoading) {
    advance(BlockState::kLoading, BlockState::kPresent);
    client_->publish(memory_);
  }
  if (has_ended) {
    ticket_ = nullptr;
  }
}

void BlockPlace::become_stale() noexcept {
  if (memory_ == nullptr) {
    return;
  }
  if (state_ == BlockState::kPresent) {
    client_->withdraw();
  }
  state_ = BlockState::kStale;
}

Slot BlockPlace::give_up_slot() noexcept {
  if (memory_ == nullptr) {
    return {};
  }
  if (state_ == BlockState::kPresent) {
    client_->withdraw();
  }
  state_ = BlockState::kAbsent;
  return {std::exchange(memory_, nullptr), bytes_, uses_.hand_over(), std::exchange(ticket_, nullptr)};
}

}  // namespace hydra
