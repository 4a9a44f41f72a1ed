// How numbers become small integers and come back, none further off than a bound.
//
//   q  = the integer nearest to x * inverse, ties to even          q' = q * step          |x - q'| <= bound
//
// The step is twice the bound. For 16-bit formats it is rounded down to a power of two: every q' is then a number of
// the format, where another step's would be rounded once more and miss the bound. Where signs are kept the step is the
// bound, and what is not zero does not become zero: x > 0, x == 0 and x < 0 are the same of q' (for x = 0 whatever its
// sign), which is what the backward of a ReLU looks at.
//
// What does not fit, that is NaN, infinities, numbers from `limit` on, and those few of fp32 whose q' misses the bound
// by the rounding of x * inverse, is the business of the block's encoding: it is then kept as it is. So is -0.0.
#pragma once

#include "csrc/base/number_format.h"

namespace hydra::codec {

struct Quantizer {
  NumberFormat format = NumberFormat::kFloat32;
  bool keep_signs = false;
  float bound = 0;
  float step = 0;
  float inverse = 0;
  float limit = 0;  // of |x|, exclusive

  /// The bound is rounded down to fp32. Throws InvalidBound for one that is negative or not finite. With a bound of 0
  /// zeros are all that is quantised.
  static Quantizer make(NumberFormat format, double bound, bool keep_signs);
};

/// |q| is at most that.
inline constexpr int kMostQuantum = 32767;

}  // namespace hydra::codec
