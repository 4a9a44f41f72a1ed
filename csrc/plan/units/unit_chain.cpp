#include "csrc/plan/units/unit_chain.h"

#include <algorithm>

namespace hydra {

UnitChain::UnitChain(const UnitJob& job, std::optional<double> link)
    : units_(job.units), repeats_(job.repeats), rest_(job.units.size()), run_length_(job.units.size(), 1) {
  for (const ShardUnit& unit : units_) {
    loads_.push_back(link ? unit.bytes / *link : 0);
  }
  rest_.back() = units_.back().seconds;
  for (std::size_t i = units_.size() - 1; i-- > 0;) {
    rest_[i] = rest_[i + 1] + units_[i].seconds;
    run_length_[i] = units_[i].shard == units_[i + 1].shard ? run_length_[i + 1] + 1 : 1;
  }
}

std::int64_t UnitChain::run_end(std::int64_t position) const {
  std::int64_t end = position + run_length_[place(position)];
  if (place(end) == 0 && end < length() && continues(end)) {  // into the next repeat
    end = run_length_[0] == size() ? length() : end + run_length_[0];
  }
  return end;
}

double UnitChain::least_loads() const {
  double once = loads_[0];
  for (std::size_t i = 1; i < units_.size(); ++i) {
    once += units_[i].shard == units_[i - 1].shard ? 0 : loads_[i];
  }
  const double saved = units_.front().shard == units_.back().shard ? loads_[0] : 0;  // where a repeat follows another
  return static_cast<double>(repeats_ - 1) * (once - saved) + once;
}

double UnitChain::least_first() const {
  double least = units_[0].seconds;
  for (std::size_t i = 1; i < units_.size(); ++i) {
    least = units_[i].shard == units_[i - 1].shard ? least : std::min(least, units_[i].seconds);
  }
  return least;
}

}  // namespace hydra
