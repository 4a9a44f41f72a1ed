// The norm of gradients: one definition, the same bits whatever the threads and the instruction set.
//
//   chunk      kNormChunk elements of one gradient, in the order of the parameter's memory; the last may be shorter
//   sum        of a chunk: element i of the chunk goes to lane i % 32, lanes are fp64, and are added by halves
//   parameter  its chunks' sums, added in order
//   norm       the square root of the parameters' sums, added in their order
//
// No square of an fp32, bf16 or fp16 number, nor any sum of them, leaves the range of fp64, so a sum is finite if and
// only if all the numbers are.
#pragma once

#include <span>

#include "csrc/base/thread_pool.h"
#include "csrc/optim/parameter_update.h"

namespace hydra {

inline constexpr std::int64_t kNormChunk = 1 << 16;

/// Of one chunk: at most kNormChunk elements.
double chunk_sum_of_squares(const void* data, NumberFormat format, std::int64_t count,
                            InstructionSet instructions = best_instruction_set()) noexcept;

struct NormInput {
  const void* data;
  NumberFormat format;
  std::int64_t count;
};

/// sums[i] becomes the sum of inputs[i]; both of the same length. The memory stays the caller's.
void sums_of_squares(std::span<const NormInput> inputs, std::span<double> sums, ThreadPool& pool,
                     InstructionSet instructions = best_instruction_set());

/// The norm from the parameters' sums.
double norm_of_sums(std::span<const double> sums) noexcept;

/// What gradients are multiplied with so that their norm is at most `max_norm`: torch's formula, in fp64. NaN when the
/// norm is.
float clip_factor(double norm, double max_norm) noexcept;

}  // namespace hydra
