// The instruction sets of the kernels. They are chosen at run time, not at compile time.
//
// The choice changes no bit of any result, except that the payload of a NaN is not defined. Thread-safe.
#pragma once

#include <vector>

namespace hydra {

enum class InstructionSet {
  kPortable,  // plain C++, for every machine
  kAvx2,      // x86: AVX2 and F16C
  kAvx512,    // x86: AVX-512 F, BW, DQ, VL
};

/// The instruction sets that this machine can run, from slow to fast.
const std::vector<InstructionSet>& supported_instruction_sets();

inline InstructionSet best_instruction_set() { return supported_instruction_sets().back(); }

}  // namespace hydra
