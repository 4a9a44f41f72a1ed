// The loops over blocks, one table for each instruction set; all give, and read, the same bytes. Only codec.cpp and
// tests call them, under StandardFloatMode.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/base/instruction_set.h"
#include "csrc/codec/block.h"
#include "csrc/codec/quantizer.h"

namespace hydra::codec {

/// How far a decoder came.
struct Decoded {
  std::int64_t blocks = 0;
  const std::uint8_t* payload = nullptr;
};

struct Kernels {
  /// `blocks` times 32 numbers of the quantizer's format; as many tags. Returns the end of the payload; up to
  /// kSlackBytes behind it are written to.
  std::uint8_t* (*encode)(const Quantizer& quantizer, Choice choice, const void* numbers, std::int64_t blocks,
                          std::uint8_t* tags, std::uint8_t* payload) noexcept;
  /// Stops before the first block that begins less than kSlackBytes before `end`. Nothing behind `end` is read,
  /// whatever the bytes are, if all tags are valid.
  Decoded (*decode)(const Quantizer& quantizer, const std::uint8_t* tags, std::int64_t blocks,
                    const std::uint8_t* payload, const std::uint8_t* end, void* numbers) noexcept;
};

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

/// Those that this machine can run, from slow to fast. Ours for AVX-512 need VBMI, VBMI2, BITALG and GFNI besides.
const std::vector<InstructionSet>& supported_instruction_sets();

const Kernels& kernels(InstructionSet instructions) noexcept;

}  // namespace hydra::codec
