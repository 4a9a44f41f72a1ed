// The types of torch's that the native optimizer loops work with.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "csrc/optim/parameter_update.h"

namespace hydra {

/// None: they do not work with it.
inline std::optional<NumberFormat> number_format(c10::ScalarType type) noexcept {
  switch (type) {
    case c10::ScalarType::Float:
      return NumberFormat::kFloat32;
    case c10::ScalarType::BFloat16:
      return NumberFormat::kBfloat16;
    case c10::ScalarType::Half:
      return NumberFormat::kFloat16;
    default:
      return std::nullopt;
  }
}

}  // namespace hydra
