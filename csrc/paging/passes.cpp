#include "csrc/paging/passes.h"

#include <exception>
#include <optional>

#include "csrc/base/clock.h"

namespace hydra {

Bytes Passes::take_peak() {
  if (activations_.meter) {
    return activations_.meter();
  }
  const Bytes peak = ledger_.take_activation_peak();
  const Lock lock = table_.lock();
  return peak + std::exchange(gradients_leaving_, 0);
}

void Passes::note_leaving(Bytes gradients) {
  const Lock lock = table_.lock();
  gradients_leaving_ += gradients;
}

void Passes::expect_usable() {
  table_.home().expect_here();
  backend_.expect_usable();
}

void Passes::begin(PassKind kind, int version) {
  expect_usable();
  take_peak();  // discards the peak between the passes
  Plan planned;
  {
    const Lock lock = table_.lock();
    trace_.begin(kind, version);
    planned = plan(lock);
  }
  fills_.begin_ahead(planned.wanted, planned.room, fills_.refusals());
}

void Passes::end(bool completed) noexcept {
  if (!table_.home().here()) {
    return;
  }
  try {
    const Bytes peak = take_peak();
    const Lock lock = table_.lock();
    trace_.end(peak, completed);
    table_.statistics(lock).order_changes = trace_.order_changes();
  } catch (const std::exception&) {
    // The meter failed, or there was no host memory for the record: later passes do not plan by this one.
    const Lock lock = table_.lock();
    trace_.end(0, /*completed=*/false);
  }
  const double waited = wait_for_fills();
  const Lock lock = table_.lock();
  table_.statistics(lock).drain_wait_seconds += waited;
}

double Passes::wait_for_fills() noexcept {
  double waited = 0.0;
  {
    const Stopwatch watch(waited);
    std::optional<ActivityRange> range;
    for (const auto& block : table_.all()) {
      TicketPtr ticket;
      {
        const Lock lock = table_.lock();
        // Present and evicted blocks have one too: their compute may wait on the device, and not on the host.
        ticket = block->last_fill;
      }
      if (ticket && !ticket->finished() && !range) {
        range.emplace(backend_.activity(), ActivityRow::kCompute, ActivityKind::kWaitForTransfers);
      }
      if (ticket) {
        ticket->wait_quietly();  // its error surfaces where the block is needed
      }
    }
  }
  return waited;
}

Passes::Plan Passes::plan(const Lock& /*lock*/) {
  const auto& blocks = table_.all();
  // Settled blocks keep their slots under any plan: their bytes are subtracted from every moment's room, and they count
  // as empty in the choice.
  std::vector<Bytes> sizes;
  sizes.reserve(blocks.size());
  Bytes settled = 0;
  Bytes beside = 0;
  for (const auto& block : blocks) {
    block->outlook.next_use = Outlook::kNever;
    block->outlook.wanted = false;
    const bool is_settled = block->truth.is_settled();
    sizes.push_back(is_settled ? 0 : block->place.bytes());
    settled += is_settled ? block->place.bytes() : 0;
    beside += is_settled ? block->truth.beside() : 0;
  }
  std::vector<Use> future =
      trace_.future(ledger_.limit() - activations_.slack - beside, activations_.gradient_reserve, blocks.size());
  if (future.empty()) {
    return {};
  }
  for (std::size_t when = future.size(); when-- > 0;) {
    table_.at(future[when].block).outlook.next_use = static_cast<std::int64_t>(when);
  }
  std::vector<bool> resident(blocks.size());
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const BlockState state = blocks[i]->place.state();
    resident[i] = state == BlockState::kPresent || state == BlockState::kLoading;
  }
  Plan planned{.room = future[0].room};
  for (Use& use : future) {
    use.room -= settled;
  }
  planned.wanted = choose_resident(future, sizes, resident);
  for (const std::int32_t index : planned.wanted) {
    table_.at(index).outlook.wanted = true;
  }
  return planned;
}

void Passes::arrive(std::int32_t index) {
  expect_usable();
  PagedBlock& block = table_.at(index);
  const Bytes peak = take_peak();
  Plan planned;
  {
    const Lock lock = table_.lock();
    trace_.arrive(index, peak);
    block.outlook.last_arrival = ++arrivals_;
    planned = plan(lock);
    ++block.pins;
  }
  const std::int64_t refusals = fills_.refusals();
  try {
    fills_.begin(block);
    fills_.begin_ahead(planned.wanted, planned.room, refusals);
    fills_.make_present(block, AcquireReason::kHook);
  } catch (...) {  // re-raised: a failed arrival pins nothing
    const Lock lock = table_.lock();
    block.unpin();
    throw;
  }
}

void Passes::forget_activations() {
  const Lock lock = table_.lock();
  trace_.forget_activations();
}

std::vector<std::pair<std::int32_t, Bytes>> Passes::recorded(PassKind kind) const {
  const Lock lock = table_.lock();
  return trace_.recorded(kind);
}

}  // namespace hydra
