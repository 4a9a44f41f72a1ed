// A model as a chain of events that is cut into stages: the planner's input, and the costs of a stage.
//
//   event       the n-th call of a block; events run in order, and backward in the reverse order
//   stage       consecutive events on one rank
//   boundary    the place between two events, named by the number of the event after it: 1 to events - 1
//
// Seconds are for one microbatch. A stage takes the seconds of its forward and backward. Each of its boundaries adds
// twice `latency + crossing bytes / bandwidth`: values cross in the forward, and as many bytes of gradients cross the
// other way in the backward. Both sides of a boundary pay. With overlap, a stage takes the longer of compute and
// communication; else it takes their sum, as in PipeDream-2BW (Narayanan et al., 2021, section 5).
//
// Stage s of S needs versions * parameters + in_flight(s) * activations bytes. in_flight(s) = S - s microbatches are
// between their forward and their backward, as in 1F1B and 2BW. A parameter that several events share counts once in
// every stage that has one of these events.
//
// Plain values, reentrant. A search over replicas, depth and microbatch size solves this problem inside.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "csrc/base/errors.h"
#include "csrc/base/types.h"

namespace hydra {

/// The planner's input makes no sense: sizes that are negative, or do not match each other.
class PlanError : public Error {
 public:
  using Error::Error;
};

/// No division fits into the given memory. Describes the division that comes closest: `stage` lacks the most bytes in
/// it, and needs `needed` bytes.
class PlanDoesNotFit : public PlanError {
 public:
  PlanDoesNotFit(const std::string& message, int lacking_stage, Bytes needed_bytes, Bytes limit_bytes)
      : PlanError(message), stage(lacking_stage), needed(needed_bytes), limit(limit_bytes) {}

  int stage;
  Bytes needed;
  Bytes limit;
};

struct ChainEvent {
  double forward_seconds = 0;
  double backward_seconds = 0;
  Bytes parameter_bytes = 0;   // of parameters that only this event uses
  Bytes activation_bytes = 0;  // kept from forward to backward, for one microbatch
};

/// Parameters that several events use.
struct SharedParameters {
  Bytes bytes = 0;
  std::vector<int> events;
};

struct ChainBoundary {
  Bytes crossing_bytes = 0;  // for one microbatch, in each direction
  bool possible = true;
};

struct Chain {
  std::vector<ChainEvent> events;
  std::vector<ChainBoundary> boundaries;  // one fewer than events; boundaries[b - 1] is before event b
  std::vector<SharedParameters> shared;

  int size() const noexcept { return static_cast<int>(events.size()); }
};

struct StageTerms {
  double bandwidth = 0;  // bytes per second between neighbours; infinity: communication costs its latency only
  double latency = 0;    // seconds
  bool overlapped = false;
  int versions = 1;
  std::vector<std::optional<Bytes>> limits;  // one for each stage, first to last; gives the number of stages

  int stages() const noexcept { return static_cast<int>(limits.size()); }
  int in_flight(int stage) const noexcept { return stages() - stage; }
};

/// The sums over events [begin, end) that costs are computed from.
struct EventRange {
  double compute_seconds = 0;
  Bytes parameter_bytes = 0;
  Bytes activation_bytes = 0;
};

/// The costs of every range of a chain. Refers to chain and terms, which have to outlive it.
class StageCosts {
 public:
  /// Throws PlanError if chain or terms contradict the comments of their members.
  StageCosts(const Chain& chain, const StageTerms& terms);

  /// Returns all ranges that end at `end`: element b is [b, end). Takes O(end + uses of shared parameters).
  std::vector<EventRange> ranges_ending_at(int end) const;

  double communication_seconds(int begin, int end) const noexcept;
  double seconds(const EventRange& range, int begin, int end) const noexcept;
  Bytes bytes(const EventRange& range, int stage) const noexcept;
  bool fits(const EventRange& range, int stage) const noexcept;
  /// Whether a stage may begin, or end, before this event.
  bool possible(int boundary) const noexcept;

  const Chain& chain() const noexcept { return chain_; }
  const StageTerms& terms() const noexcept { return terms_; }

 private:
  const Chain& chain_;
  const StageTerms& terms_;
  std::vector<double> boundary_seconds_;          // one for each event's begin, and for the chain's end
  std::vector<std::vector<std::size_t>> groups_;  // indices of the shared parameters of each event
};

}  // namespace hydra
