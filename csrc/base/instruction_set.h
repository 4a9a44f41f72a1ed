// Which instructions the kernels use: chosen when the program runs, never when it is compiled, and without influence
// on a single bit of any result. NaN is the exception: a NaN result is NaN everywhere, its payload is not defined.
#pragma once

#include <vector>

namespace hydra {

enum class InstructionSet {
  kPortable,  // what every machine has
  kAvx2,      // x86: AVX2 and F16C
  kAvx512,    // x86: AVX-512 F, BW, DQ, VL
};

/// Those that this machine can run, from slow to fast.
const std::vector<InstructionSet>& supported_instruction_sets();

inline InstructionSet best_instruction_set() { return supported_instruction_sets().back(); }

}  // namespace hydra
