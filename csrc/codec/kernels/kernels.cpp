#include "csrc/codec/kernels/kernels.h"

namespace hydra::codec {

namespace {

std::vector<InstructionSet> probe() {
  std::vector<InstructionSet> found;
  for (const InstructionSet instructions : hydra::supported_instruction_sets()) {
    bool all = true;
#if defined(__x86_64__)
    if (instructions == InstructionSet::kAvx2) {
      all = __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("lzcnt");
    } else if (instructions == InstructionSet::kAvx512) {
      all = __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
            __builtin_cpu_supports("avx512bitalg") && __builtin_cpu_supports("gfni") &&
            __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("lzcnt");
    }
#endif
    if (all) {
      found.push_back(instructions);
    }
  }
  return found;
}

}  // namespace

const std::vector<InstructionSet>& supported_instruction_sets() {
  static const std::vector<InstructionSet> found = probe();
  return found;
}

const Kernels& kernels([[maybe_unused]] InstructionSet instructions) noexcept {
#if defined(__x86_64__)
  if (instructions != InstructionSet::kPortable) {
    return instructions == InstructionSet::kAvx2 ? kAvx2Kernels : kAvx512Kernels;
  }
#endif
  return kPortableKernels;
}

}  // namespace hydra::codec
