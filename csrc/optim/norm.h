// The norm of gradients. One definition gives the same bits for any number of threads and any instruction set.
//
//   chunk      kNormChunk elements of one gradient, in the order of the parameter's memory; the last may be shorter
//   sum        the squares of a chunk: element i goes to accumulator i % 32, in fp64; accumulators are added by halves
//   parameter  its chunks' sums, added in order
//   norm       the square root of the parameters' sums, added in their order
//
// No square of an fp32, bf16 or fp16 number, and no sum of squares, leaves the range of fp64. So a sum is finite if and
// only if all numbers are. Memory is the caller's. Reentrant.
#pragma once

#include <span>

#include "csrc/base/thread_pool.h"
#include "csrc/optim/parameter_update.h"

namespace hydra {

inline constexpr std::int64_t kNormChunk = 1 << 16;

/// Returns the sum of one chunk: at most kNormChunk elements.
double chunk_sum_of_squares(const void* data, NumberFormat format, std::int64_t count,
                            InstructionSet instructions = best_instruction_set()) noexcept;

struct NormInput {
  const void* data;
  NumberFormat format;
  std::int64_t count;
};

/// Sets sums[i] to the sum of inputs[i]. Both spans have the same length.
void sums_of_squares(std::span<const NormInput> inputs, std::span<double> sums, ThreadPool& pool,
                     InstructionSet instructions = best_instruction_set());

/// Returns the norm of the parameters' sums.
double norm_of_sums(std::span<const double> sums) noexcept;

/// Returns the factor that limits the gradients' norm to `max_norm`: torch's formula, in fp64. NaN if the norm is NaN.
float clip_factor(double norm, double max_norm) noexcept;

}  // namespace hydra
