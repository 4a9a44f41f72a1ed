// A model as a chain of events, cut into stages: what is given, and what a stage then costs.
//
//   event       the n-th call of a block; events run in order, and backward in the reverse order
//   stage       consecutive events on one rank
//   boundary    between two events, by the number of the event after it: 1 to events - 1
//
// Seconds are for one microbatch. A stage takes its forward and backward and, for each of its boundaries, twice
// `latency + crossing bytes / bandwidth`: values arrive or leave in the forward, as many bytes of gradients go the
// other way in the backward. Both sides of a boundary pay. Overlapped, a stage takes the longer of computing and
// communicating; else their sum, as in PipeDream-2BW (Narayanan et al., 2021, section 5).
//
// Bytes of stage s of S: versions * parameters + in_flight(s) * activations, with in_flight(s) = S - s microbatches
// between their forward and their backward, as in 1F1B and 2BW. A parameter that several events share is counted once
// in every stage that has one of them.
//
// Plain values, no threads. This is the inner problem of a search over replicas, depth and microbatch size.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "csrc/base/errors.h"
#include "csrc/base/types.h"

namespace hydra {

/// What was asked of a planner makes no sense: sizes that do not go together, or are no sizes.
class PlanError : public Error {
 public:
  using Error::Error;
};

/// Nothing fits into the memory that was given. `needed` is the least that the stage that lacks most has to have;
/// of all divisions, one that lacks least is described.
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
  std::vector<ChainBoundary> boundaries;  // one less than events; boundaries[b - 1] is before event b
  std::vector<SharedParameters> shared;

  int size() const noexcept { return static_cast<int>(events.size()); }
};

struct StageTerms {
  double bandwidth = 0;  // bytes a second, between neighbours; infinity: communication costs its latency only
  double latency = 0;    // seconds
  bool overlapped = false;
  int versions = 1;
  std::vector<std::optional<Bytes>> limits;  // one for each stage, first to last; their number is that of the stages

  int stages() const noexcept { return static_cast<int>(limits.size()); }
  int in_flight(int stage) const noexcept { return stages() - stage; }
};

/// The sums over events [begin, end) that costs are made of.
struct EventRange {
  double compute_seconds = 0;
  Bytes parameter_bytes = 0;
  Bytes activation_bytes = 0;
};

/// Answers for every range of a chain. Holds references: chain and terms have to outlive it.
class StageCosts {
 public:
  /// Throws PlanError where chain or terms are not as their comments say.
  StageCosts(const Chain& chain, const StageTerms& terms);

  /// Element b is the range [b, end). O(end + uses of shared parameters).
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
  std::vector<std::vector<std::size_t>> groups_;  // of shared parameters, by event
};

}  // namespace hydra
