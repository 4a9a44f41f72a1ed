// What is to become of tensors that a thread saves in a stash, and which part of the model saves them.
//
// A scope belongs to one stash, and to a key of its beginner: a module, as a rule. Scopes of a stash nest; those of
// several stashes lie beside each other. One whose end never came (its module's own hooks had failed) ends with the one
// around it. Threads: each has its own.
#pragma once

#include <cstdint>
#include <memory>

#include "csrc/pytorch/stash/layer_bounds.h"

namespace hydra {

enum class TreatmentKind : std::uint8_t {
  kMove,
  kMoveConvolutionInputs,  // vDNN's "conv": what no convolution takes in stays
  kCompress,               // what need not come back exactly; the rest moves
  kKeep,
};

struct Treatment {
  TreatmentKind kind = TreatmentKind::kMove;
  std::shared_ptr<LayerBounds> bounds;  // of kCompress

  bool asks_operators() const noexcept {
    return kind == TreatmentKind::kCompress || kind == TreatmentKind::kMoveConvolutionInputs;
  }
};

using TreatmentPtr = std::shared_ptr<const Treatment>;
using StashIdentity = std::uint64_t;
using ScopeKey = std::uintptr_t;

inline constexpr std::int32_t kNoPart = -1;

/// Without a treatment, or a part, that of the scope around it goes on.
void begin_scope(StashIdentity stash, ScopeKey key, TreatmentPtr treatment, std::int32_t part);
/// Of the innermost scope of that stash with that key, if there is one.
void end_scope(StashIdentity stash, ScopeKey key) noexcept;
/// kMove where none has begun.
const Treatment& current_treatment(StashIdentity stash) noexcept;
std::int32_t current_part(StashIdentity stash) noexcept;

}  // namespace hydra
