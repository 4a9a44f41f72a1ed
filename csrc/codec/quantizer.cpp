#include "csrc/codec/quantizer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "csrc/base/errors.h"

namespace hydra::codec {

namespace {

// Powers of two whose inverses are normal numbers too.
constexpr double kLeastStep = 0x1p-126;
constexpr double kMostStep = 0x1p126;
constexpr double kMostHalfStep = 0x1p15;  // the largest step of fp16

double greatest(NumberFormat format) {
  switch (format) {
    case NumberFormat::kFloat32:
      return std::numeric_limits<float>::max();
    case NumberFormat::kBfloat16:
      return 0x1.FEp127;
    case NumberFormat::kFloat16:
      return 65504.0;
  }
  return 0;
}

float rounded_down(double bound) {
  const auto nearest = static_cast<float>(std::min<double>(bound, std::numeric_limits<float>::max()));
  return nearest > bound ? std::nextafter(nearest, 0.0F) : nearest;
}

}  // namespace

Quantizer Quantizer::make(NumberFormat format, double bound, bool keep_signs) {
  HYDRA_EXPECT(std::isfinite(bound) && bound >= 0, InvalidBound,
               "the error bound cannot be " + std::to_string(bound) + ": give a finite number, 0 or more");
  Quantizer made{format, keep_signs, rounded_down(bound)};
  double step = std::min((keep_signs ? 1.0 : 2.0) * made.bound, kMostStep);
  if (format != NumberFormat::kFloat32 && step > 0) {
    step = std::exp2(std::floor(std::log2(step)));
  }
  if (format == NumberFormat::kFloat16) {
    step = std::min(step, kMostHalfStep);
  }
  if (!(step >= kLeastStep)) {
    made.limit = std::numeric_limits<float>::denorm_min();
    return made;
  }
  made.step = static_cast<float>(step);
  made.inverse = static_cast<float>(1.0 / made.step);
  // The last multiple of the step that is finite, and the numbers that round to it.
  const double last = std::floor(greatest(format) / made.step) * made.step;
  const double limit = std::min(kMostQuantum * static_cast<double>(made.step), last + made.step / 2.0);
  made.limit = static_cast<float>(std::min<double>(limit, std::numeric_limits<float>::max()));
  return made;
}

}  // namespace hydra::codec
