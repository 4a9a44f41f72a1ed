// The policy for tensors that a thread saves in a stash, and the part of the model that saves them.
//
// Scopes set both. A scope belongs to one stash, and usually to a module, whose calls begin and end it. Scopes of one
// stash nest, also inside themselves; those of several stashes are independent. A scope that was never ended, because
// hooks of its module failed, ends with the scope around it. Threads: each thread has its own scopes.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

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

inline constexpr std::int32_t kNoPart = -1;

class StashScope {
 public:
  /// With a null treatment, or kNoPart, that of the scope around it continues.
  StashScope(StashIdentity stash, TreatmentPtr treatment, std::int32_t part) noexcept;

  /// Begins the scope on the calling thread.
  void begin() const;
  /// Ends its last begin() on the calling thread, and all scopes of the stash inside it.
  void end() const noexcept;

  const TreatmentPtr& treatment() const noexcept { return treatment_; }
  /// Sets that of scopes that begin from now on.
  void set_treatment(TreatmentPtr treatment) noexcept { treatment_ = std::move(treatment); }

 private:
  const StashIdentity stash_;
  const std::uint64_t key_;  // no other scope ever has the same
  TreatmentPtr treatment_;
  const std::int32_t part_;
};

/// The treatment of the innermost scope that has one; kMove if there is none.
const Treatment& current_treatment(StashIdentity stash) noexcept;
std::int32_t current_part(StashIdentity stash) noexcept;

}  // namespace hydra
