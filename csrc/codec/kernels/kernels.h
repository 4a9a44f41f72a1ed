// The codec's loops over blocks: one table of functions for each instruction set.
//
// All tables write and read the same bytes. Only codec.cpp and tests call them, under StandardFloatMode.
// Reentrant. Memory is the caller's.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/base/instruction_set.h"
#include "csrc/codec/block.h"
#include "csrc/codec/quantizer.h"

namespace hydra::codec {

/// The progress of a decoder: the blocks that it has decoded, and the payload behind them.
struct Decoded {
  std::int64_t blocks = 0;
  const std::uint8_t* payload = nullptr;
};

struct Kernels {
  /// Encodes `blocks` times 32 numbers of the quantizer's format, and writes `blocks` tags. Returns the end of the
  /// payload; up to kSlackBytes behind the end may be overwritten.
  std::uint8_t* (*encode)(const Quantizer& quantizer, Choice choice, const void* numbers, std::int64_t blocks,
                          std::uint8_t* tags, std::uint8_t* payload) noexcept;
  /// Decodes up to `blocks` blocks; stops before the first one that begins less than kSlackBytes before `end`.
  /// If all tags are valid, no byte behind `end` is read, whatever the payload is.
  Decoded (*decode)(const Quantizer& quantizer, const std::uint8_t* tags, std::int64_t blocks,
                    const std::uint8_t* payload, const std::uint8_t* end, void* numbers) noexcept;
};

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

/// The instruction sets whose kernels this machine can run, from slow to fast. The AVX-512 kernels also need VBMI,
/// VBMI2, BITALG and GFNI.
const std::vector<InstructionSet>& supported_instruction_sets();

const Kernels& kernels(InstructionSet instructions) noexcept;

}  // namespace hydra::codec
