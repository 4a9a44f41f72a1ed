#include "csrc/paging/standing_plan.h"

#include <algorithm>
#include <utility>

namespace hydra {

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
    return block->outlook.next_use == Outlook::kNever || (block->outlook.wanted && block->place.has_fill());
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

}  // namespace hydra
