// The kernels for every machine, and for the end of every range.
#include <bit>
#include <cmath>
#include <cstdint>
#include <variant>

#include "csrc/base/half.h"
#include "csrc/optim/kernels/kernels.h"

namespace hydra {

namespace portable {

#define HYDRA_INLINE inline
#define HYDRA_KERNEL static

namespace {

#include "csrc/optim/kernels/scalar_vector.h"

static_assert(Vector::kWidth == 1, "no numbers are left at the end");

#include "csrc/optim/kernels/kernel_frame.h"

void update(const ParameterUpdate& what, std::int64_t begin, std::int64_t end, float scale) noexcept {
  run_vectors(what, begin, end, scale);
}

void add_squares(const void* data, NumberFormat format, std::int64_t count, double* lanes) noexcept {
  for (std::int64_t at = 0; at < count; ++at) {
    const double value = number(data, format, at);
    lanes[at % kNormLanes] += value * value;  // the product is exact, so fusing does not change the sum
  }
}

}  // namespace

}  // namespace portable

const Kernels kPortableKernels = {.update = &portable::update, .add_squares = &portable::add_squares};

}  // namespace hydra
