// The vocabulary of a pipeline schedule.
//
//   stage       consecutive blocks owned by a rank; stage s computes after stage s - 1
//   microbatch  the samples that one action computes with; a batch has one or more, numbered from 0
//   batch       the samples of one step: their gradients, summed over the microbatches, make one update of each stage
//   body        the actions of one rank in one step; batches are counted from that of the step (0, -1, ...)
//   version     a copy of a stage's weights; training starts with W(0), and the update with batch t makes W(t + 1)
//   hop         the way from one stage to the next; each direction of each hop is a queue of its own
//   in place    the update of a stage with one buffer: the next version overwrites the only one
//
// Plain values, without threads and clocks: they say only what is done and in which order.
#pragma once

#include <compare>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace hydra::schedule {

/// The kind of an action. The letters are those of the text form.
enum class ActionKind : std::uint8_t {
  kForward,            // F: saves tensors for backward; the microbatch is in flight from now on
  kBackward,           // B: adds to the batch's gradients; the microbatch is no longer in flight
  kReduce,             // R: the stage's gradients of the batch are complete; their sums over ranks start now
  kBeginUpdate,        // BU: the update may run behind later actions, as soon as the sums that R started have ended
  kFinishUpdate,       // U: waits for the batch's sums on every stage, completes the update and publishes the next
                       // version
  kSendActivation,     // SF: to the next stage; returns at once
  kReceiveActivation,  // RF: from the previous stage; posts a buffer and returns at once, F waits until it is filled
  kSendGradient,       // SB: to the previous stage; returns at once
  kReceiveGradient,    // RB: from the next stage; posts a buffer and returns at once, B waits until it is filled
};

struct Action {
  ActionKind kind = ActionKind::kForward;
  int stage = 0;
  std::int64_t batch = 0;  // counted from the start of training; in a body from the batch of the step
  int microbatch = 0;      // 0 for R, BU and U, which concern a whole batch

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

/// A stage, rank, batch or position as an index into a container.
constexpr std::size_t index(std::int64_t value) noexcept { return static_cast<std::size_t>(value); }

// No real schedule comes near these limits. They bound the product of the two, and the memory that a text can demand.
inline constexpr int kMostStages = 4096;
inline constexpr int kMostMicrobatches = 1 << 20;

inline constexpr int kUnlimited = std::numeric_limits<int>::max();

}  // namespace hydra::schedule
