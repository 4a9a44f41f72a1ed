// Quantisation: numbers become small integers and come back with an error of at most the bound.
//
//   q  = the integer nearest to x * inverse, ties to even          q' = q * step          |x - q'| <= bound
//
// The step is twice the bound. For 16-bit formats it is rounded down to a power of two: every q' is then a number of
// the format. With another step q' would be rounded once more and miss the bound.
// With keep_signs the step equals the bound, and no non-zero number becomes zero. Then q' and x agree on > 0, == 0 and
// < 0, which is what the backward of a ReLU reads. Zeros of either sign count as zero.
//
// Some numbers do not fit: NaN, infinities, numbers from `limit` on, and a few fp32 numbers whose q' misses the bound
// by the rounding of x * inverse. The block's encoding stores such blocks raw. It also preserves -0.0.
// A plain value; make() is reentrant.
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

  /// Rounds the bound down to fp32. Throws InvalidBound if it is negative or not finite. A bound of 0 quantises zeros
  /// only.
  static Quantizer make(NumberFormat format, double bound, bool keep_signs);
};

/// The largest |q|.
inline constexpr int kMostQuantum = 32767;

}  // namespace hydra::codec
