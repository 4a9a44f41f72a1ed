// The policy for tensors that a thread saves in a stash, and the part of the model that saves them.
//
// Scopes set both. A scope belongs to one stash, and has a key that its caller chooses, usually a module. Scopes of one
// stash nest; those of several stashes are independent. A scope that was never ended, because hooks of its module
// failed, ends with the scope around it. Threads: each thread has its own scopes.
#pragma once

#include <cstdint>
#include <memory>

#include "csrc/pytorch/stash/layer_bounds.h"

namespace hydra {

enum class TreatmentKind : std::uint8_t {
  kMove,
  kMoveConvolutionInputs,  // vDNN's "conv": moves only the inputs of convolutions
  kCompress,               // encodes tensors that need not come back exactly, and moves the others
  kKeep,
};

/// How long tensors that may leave stay on the device. Of one that several modules save, the longest counts.
enum class Staying : std::uint8_t {
  kNever,      // they leave as they are saved, as a stream if they may
  kWhileRoom,  // as the stash's budget says
  kLongest,    // they are in that budget, but only an allocation that finds no room makes them leave, behind all others
  kAlways,
};

struct Treatment {
  TreatmentKind kind = TreatmentKind::kMove;
  std::shared_ptr<LayerBounds> bounds;  // for kCompress
  Staying staying = Staying::kWhileRoom;

  bool asks_operators() const noexcept {
    return kind == TreatmentKind::kCompress || kind == TreatmentKind::kMoveConvolutionInputs;
  }
};

using TreatmentPtr = std::shared_ptr<const Treatment>;
using StashIdentity = std::uint64_t;
using ScopeKey = std::uintptr_t;

inline constexpr std::int32_t kNoPart = -1;

/// Begins a scope. With a null treatment, or kNoPart, that of the scope around it continues.
void begin_scope(StashIdentity stash, ScopeKey key, TreatmentPtr treatment, std::int32_t part);
/// Ends the innermost scope of that stash with that key, and all scopes of the stash inside it.
void end_scope(StashIdentity stash, ScopeKey key) noexcept;
/// The treatment of the innermost scope that has one; kMove if there is none.
const Treatment& current_treatment(StashIdentity stash) noexcept;
std::int32_t current_part(StashIdentity stash) noexcept;

}  // namespace hydra
