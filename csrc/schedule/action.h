// The words of a pipeline schedule.
//
//   stage       consecutive blocks owned by a rank; stage s computes after stage s - 1
//   microbatch  what runs through the pipeline at once; a batch has one or more, counted from 0 in it
//   batch       what one step trains with: its gradients, summed over its microbatches, make one update of each stage
//   body        the actions of one rank in one step, with batches counted from that of the step (0, -1, ...)
//   version     W(0) is what training starts with, the update with batch t's gradients makes W(t + 1)
//   hop         the way from one stage to the next; each direction of each hop is a queue of its own
//   in place    how a stage with one buffer is updated: the next version is written over the only one
//
// Values. No thread, no clock: what is here only says what is to be done, in which order.
#pragma once

#include <compare>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace hydra::schedule {

/// What is done. The letters are those of the text form.
enum class ActionKind : std::uint8_t {
  kForward,            // F: keeps what backward needs: the microbatch is in flight
  kBackward,           // B: adds to the batch's gradients; the microbatch is no longer in flight
  kReduce,             // R: the batch's gradients of the stage are complete; sums over ranks start now
  kBeginUpdate,        // BU: from here on the update may be made, behind what follows, once what R started has ended
  kFinishUpdate,       // U: waits for what R started, on every stage of that batch, makes what is left of the update,
                       // and publishes the next version
  kSendActivation,     // SF: to the next stage; returns at once
  kReceiveActivation,  // RF: from the stage before; room is offered now, F waits until it is filled
  kSendGradient,       // SB: to the stage before; returns at once
  kReceiveGradient,    // RB: from the next stage; room is offered now, B waits until it is filled
};

struct Action {
  ActionKind kind = ActionKind::kForward;
  int stage = 0;
  std::int64_t batch = 0;  // counted from the start of training; in a body from the batch of the step
  int microbatch = 0;      // 0 for R, BU and U, which are of a whole batch

  auto operator<=>(const Action&) const = default;
};

using Actions = std::vector<Action>;

/// "F", "B", "R", "BU", "U", "SF", "RF", "SB" or "RB".
const char* letters(ActionKind kind) noexcept;
constexpr bool is_compute(ActionKind kind) noexcept {
  return kind == ActionKind::kForward || kind == ActionKind::kBackward;
}
constexpr bool is_of_batch(ActionKind kind) noexcept {
  return kind == ActionKind::kReduce || kind == ActionKind::kBeginUpdate || kind == ActionKind::kFinishUpdate;
}
constexpr bool is_communication(ActionKind kind) noexcept { return kind >= ActionKind::kSendActivation; }
constexpr bool is_send(ActionKind kind) noexcept {
  return kind == ActionKind::kSendActivation || kind == ActionKind::kSendGradient;
}

/// "F0.3" or "R0": kind, stage and microbatch.
std::string token(const Action& action);
/// "F0.3 of batch 5".
std::string in_words(const Action& action);

/// Containers are indexed by size_t, stages and ranks are ints.
constexpr std::size_t index(std::int64_t value) noexcept { return static_cast<std::size_t>(value); }

// More than any schedule has; they keep products of the two, and the room that a text can ask for, within bounds.
inline constexpr int kMostStages = 4096;
inline constexpr int kMostMicrobatches = 1 << 20;

inline constexpr int kUnlimited = std::numeric_limits<int>::max();

}  // namespace hydra::schedule
