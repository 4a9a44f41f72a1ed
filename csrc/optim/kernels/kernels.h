// The optimizer's loops over numbers: one table of functions for each instruction set.
//
// Only run_update() and norm.cpp call them. Reentrant. Memory is the caller's.
#pragma once

#include "csrc/optim/parameter_update.h"

namespace hydra {

/// The number of partial sums of squares: element i of a chunk belongs to lane i % kNormLanes.
inline constexpr std::int64_t kNormLanes = 32;

struct Kernels {
  /// See run_update().
  void (*update)(const ParameterUpdate& update, std::int64_t begin, std::int64_t end, float scale) noexcept;
  /// Adds the squares of `count` numbers, in fp64, to `lanes`; the first one belongs to lane 0.
  void (*add_squares)(const void* data, NumberFormat format, std::int64_t count, double* lanes) noexcept;
};

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

inline const Kernels& kernels([[maybe_unused]] InstructionSet instructions) noexcept {
#if defined(__x86_64__)
  if (instructions != InstructionSet::kPortable) {
    return instructions == InstructionSet::kAvx2 ? kAvx2Kernels : kAvx512Kernels;
  }
#endif
  return kPortableKernels;
}

}  // namespace hydra
