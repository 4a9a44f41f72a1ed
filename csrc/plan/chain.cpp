#include "csrc/plan/chain.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace hydra {

namespace {

bool is_duration(double seconds) { return std::isfinite(seconds) && seconds >= 0; }

void check_chain(const Chain& chain) {
  HYDRA_EXPECT(!chain.events.empty(), PlanError, "a chain without events cannot be planned");
  HYDRA_EXPECT(chain.boundaries.size() + 1 == chain.events.size(), PlanError,
               std::to_string(chain.events.size()) + " events need " + std::to_string(chain.events.size() - 1) +
                   " boundaries; " + std::to_string(chain.boundaries.size()) + " were given");
  for (std::size_t i = 0; i < chain.events.size(); ++i) {
    const ChainEvent& event = chain.events[i];
    HYDRA_EXPECT(is_duration(event.forward_seconds) && is_duration(event.backward_seconds), PlanError,
                 "event " + std::to_string(i) + ": its seconds are negative or not finite");
    HYDRA_EXPECT(event.parameter_bytes >= 0 && event.activation_bytes >= 0, PlanError,
                 "event " + std::to_string(i) + ": its bytes are negative");
  }
  for (std::size_t i = 0; i < chain.boundaries.size(); ++i) {
    HYDRA_EXPECT(chain.boundaries[i].crossing_bytes >= 0, PlanError,
                 "boundary " + std::to_string(i + 1) + ": its crossing bytes are negative");
  }
  for (const SharedParameters& shared : chain.shared) {
    HYDRA_EXPECT(shared.bytes >= 0, PlanError, "shared parameters have negative bytes");
    for (const int event : shared.events) {
      HYDRA_EXPECT(
          event >= 0 && event < chain.size(), PlanError,
          "shared parameters are used by event " + std::to_string(event) + " of " + std::to_string(chain.size()));
    }
  }
}

void check_terms(const StageTerms& terms) {
  HYDRA_EXPECT(terms.stages() > 0, PlanError, "a plan needs at least one stage");
  HYDRA_EXPECT(terms.bandwidth > 0, PlanError, "the bandwidth must be above zero");
  HYDRA_EXPECT(is_duration(terms.latency), PlanError, "the latency is negative or not finite");
  HYDRA_EXPECT(terms.versions > 0, PlanError, "a plan needs at least one version of the weights");
  for (const std::optional<Bytes>& limit : terms.limits) {
    HYDRA_EXPECT(!limit || *limit >= 0, PlanError, "a limit of memory is negative");
  }
}

void check_sums(const Chain& chain, const StageTerms& terms) {
  double bytes = 0;
  for (const ChainEvent& event : chain.events) {
    bytes += static_cast<double>(event.parameter_bytes) + static_cast<double>(event.activation_bytes);
  }
  for (const SharedParameters& shared : chain.shared) {
    bytes += static_cast<double>(shared.bytes);
  }
  bytes *= std::max(terms.versions, terms.stages());
  for (const ChainBoundary& boundary : chain.boundaries) {
    bytes += static_cast<double>(boundary.crossing_bytes);
  }
  HYDRA_EXPECT(bytes < 0x1p62, PlanError, "the bytes of all events together are too many to count");
}

}  // namespace

StageCosts::StageCosts(const Chain& chain, const StageTerms& terms) : chain_(chain), terms_(terms) {
  check_chain(chain);
  check_terms(terms);
  check_sums(chain, terms);
  boundary_seconds_.assign(chain.events.size() + 1, 0.0);
  for (std::size_t i = 0; i < chain.boundaries.size(); ++i) {
    const double bytes = static_cast<double>(chain.boundaries[i].crossing_bytes);
    boundary_seconds_[i + 1] = 2 * (terms.latency + bytes / terms.bandwidth);
  }
  groups_.resize(chain.events.size());
  for (std::size_t group = 0; group < chain.shared.size(); ++group) {
    for (const int event : chain.shared[group].events) {
      groups_[static_cast<std::size_t>(event)].push_back(group);
    }
  }
}

std::vector<EventRange> StageCosts::ranges_ending_at(int end) const {
  std::vector<EventRange> ranges(static_cast<std::size_t>(end));
  std::vector<bool> counted(chain_.shared.size(), false);
  EventRange range;
  for (std::size_t i = ranges.size(); i-- > 0;) {
    const ChainEvent& event = chain_.events[i];
    range.compute_seconds += event.forward_seconds + event.backward_seconds;
    range.parameter_bytes += event.parameter_bytes;
    range.activation_bytes += event.activation_bytes;
    for (const std::size_t group : groups_[i]) {
      range.parameter_bytes += counted[group] ? 0 : chain_.shared[group].bytes;
      counted[group] = true;
    }
    ranges[i] = range;
  }
  return ranges;
}

double StageCosts::communication_seconds(int begin, int end) const noexcept {
  return boundary_seconds_[static_cast<std::size_t>(begin)] + boundary_seconds_[static_cast<std::size_t>(end)];
}

double StageCosts::seconds(const EventRange& range, int begin, int end) const noexcept {
  const double communication = communication_seconds(begin, end);
  return terms_.overlapped ? std::max(range.compute_seconds, communication) : range.compute_seconds + communication;
}

Bytes StageCosts::bytes(const EventRange& range, int stage) const noexcept {
  return terms_.versions * range.parameter_bytes + terms_.in_flight(stage) * range.activation_bytes;
}

bool StageCosts::fits(const EventRange& range, int stage) const noexcept {
  const std::optional<Bytes>& limit = terms_.limits[static_cast<std::size_t>(stage)];
  return !limit || bytes(range, stage) <= *limit;
}

bool StageCosts::possible(int boundary) const noexcept {
  return boundary == 0 || boundary == chain_.size() ||
         chain_.boundaries[static_cast<std::size_t>(boundary - 1)].possible;
}

}  // namespace hydra
