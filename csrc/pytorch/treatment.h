// What is to become of tensors that a thread saves.
#pragma once

#include <memory>
#include <optional>

#include "csrc/pytorch/layer_bounds.h"

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

/// Until the matching end_treatment(), on this thread; they nest.
void begin_treatment(TreatmentPtr treatment);
void end_treatment() noexcept;
/// The calling thread's; kMove where none has begun.
const Treatment& current_treatment() noexcept;

/// Which part of a model runs on this thread, for the figures; they nest.
void begin_part(std::int32_t part);
void end_part() noexcept;
inline constexpr std::int32_t kNoPart = -1;
std::int32_t current_part() noexcept;

}  // namespace hydra
