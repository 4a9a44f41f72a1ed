// Conversions between torch's types and the number formats that the native loops of optimizers and the codec support.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "csrc/base/number_format.h"

namespace hydra {

/// Returns nullopt for types that the loops do not support.
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

inline c10::ScalarType scalar_type(NumberFormat format) noexcept {
  switch (format) {
    case NumberFormat::kBfloat16:
      return c10::ScalarType::BFloat16;
    case NumberFormat::kFloat16:
      return c10::ScalarType::Half;
    default:
      return c10::ScalarType::Float;
  }
}

}  // namespace hydra
