#include "csrc/paging/passes.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "csrc/base/clock.h"

namespace hydra {

// ---- the plan that stands -------------------------------------------------------------------------------------------
PlannedMemory PlannedMemory::of(const BlockTable& table, Bytes limit) noexcept {
  PlannedMemory memory{.limit = limit};
  for (const auto& block : table.all()) {
    if (block->truth.is_settled()) {
      memory.settled += block->place.bytes();
      memory.beside += block->truth.beside();
    }
  }
  return memory;
}

void StandingPlan::set(const BlockTable& table, const PlannedMemory& memory, std::vector<Use> future, bool is_ahead) {
  future_ = std::move(future);
  next_ = is_ahead ? 0 : 1;
  memory_ = memory;
  std::vector<Bytes> sizes;
  sizes.reserve(table.all().size());
  for (const auto& block : table.all()) {
    sizes.push_back(block->truth.is_settled() ? 0 : block->place.bytes());
  }
  if (!stands(table) || !all_fit(future_, sizes)) {
    drop();
  }
}

bool StandingPlan::stands(const BlockTable& table) const noexcept {
  return std::ranges::all_of(table.all(), [](const auto& block) {
    return block->outlook.next_use == Outlook::kNever || (block->outlook.wanted && block->has_fill());
  });
}

std::optional<Bytes> StandingPlan::go_on(const BlockTable& table, const PlannedMemory& memory, std::int32_t block) {
  if (next_ >= future_.size() || future_[next_].block != block || memory != memory_ || !stands(table)) {
    drop();
    return std::nullopt;
  }
  if (next_ > 0) {
    const std::int32_t before = future_[next_ - 1].block;
    const auto from = future_.begin() + static_cast<std::ptrdiff_t>(next_);
    const auto again = std::find_if(from, future_.end(), [before](const Use& use) { return use.block == before; });
    Outlook& outlook = table.at(before).outlook;
    outlook.wanted = again != future_.end();
    outlook.next_use = outlook.wanted ? again - future_.begin() : Outlook::kNever;
  }
  return future_[next_++].room;
}

// ---- passes ---------------------------------------------------------------------------------------------------------
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
    planned = plan(lock, PlannedMemory::of(table_, ledger_.limit()), /*is_ahead=*/true);
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
    const Stall stall(backend_.stalls());
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

Passes::Plan Passes::plan_use(const Lock& lock, std::int32_t block) {
  const PlannedMemory memory = PlannedMemory::of(table_, ledger_.limit());
  if (const std::optional<Bytes> room = standing_.go_on(table_, memory, block)) {
    return {.wanted = {}, .room = *room + memory.settled};
  }
  return plan(lock, memory, /*is_ahead=*/false);
}

Passes::Plan Passes::plan(const Lock& /*lock*/, const PlannedMemory& memory, bool is_ahead) {
  standing_.drop();
  const auto& blocks = table_.all();
  // Settled blocks keep their slots under any plan: their bytes are subtracted from every moment's room, and they count
  // as empty in the choice.
  std::vector<Bytes> sizes;
  std::vector<bool> resident;
  sizes.reserve(blocks.size());
  resident.reserve(blocks.size());
  for (const auto& block : blocks) {
    block->outlook.next_use = Outlook::kNever;
    block->outlook.wanted = false;
    sizes.push_back(block->truth.is_settled() ? 0 : block->place.bytes());
    resident.push_back(block->has_fill());
  }
  std::vector<Use> future =
      trace_.future(memory.limit - activations_.slack - memory.beside, activations_.gradient_reserve, blocks.size());
  if (future.empty()) {
    return {};
  }
  for (std::size_t when = future.size(); when-- > 0;) {
    table_.at(future[when].block).outlook.next_use = static_cast<std::int64_t>(when);
  }
  Plan planned{.wanted = {}, .room = future[0].room};
  for (Use& use : future) {
    use.room -= memory.settled;
  }
  planned.wanted = choose_resident(future, sizes, resident);
  for (const std::int32_t index : planned.wanted) {
    table_.at(index).outlook.wanted = true;
  }
  standing_.set(table_, memory, std::move(future), is_ahead);
  return planned;
}

void Passes::arrive(std::int32_t index) {
  expect_usable();
  PagedBlock& block = table_.at(index);
  const Bytes peak = take_peak();
  Plan planned;
  bool is_ready = false;
  {
    const Lock lock = table_.lock();
    trace_.arrive(index, peak);
    block.outlook.last_arrival = ++arrivals_;
    planned = plan_use(lock, index);
    ++block.pins;
    is_ready = block.place.is_ready();
    if (is_ready) {
      block.place.uses().note_use();
    }
  }
  const std::int64_t refusals = fills_.refusals();
  try {
    if (!is_ready) {
      fills_.begin(block);
    }
    fills_.begin_ahead(planned.wanted, planned.room, refusals);
    if (!is_ready) {
      fills_.make_present(block, AcquireReason::kHook);
    }
  } catch (...) {  // re-raised: a failed arrival pins nothing
    const Lock lock = table_.lock();
    block.unpin();
    throw;
  }
}

void Passes::forget_activations() {
  const Lock lock = table_.lock();
  trace_.forget_activations();
  standing_.drop();
}

std::vector<std::pair<std::int32_t, Bytes>> Passes::recorded(PassKind kind) const {
  const Lock lock = table_.lock();
  return trace_.recorded(kind);
}

}  // namespace hydra
