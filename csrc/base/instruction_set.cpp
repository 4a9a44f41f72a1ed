#include "csrc/base/instruction_set.h"

namespace hydra {

namespace {

std::vector<InstructionSet> probe() {
  std::vector<InstructionSet> found = {InstructionSet::kPortable};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    found.push_back(InstructionSet::kAvx2);
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    found.push_back(InstructionSet::kAvx512);
  }
#endif
  return found;
}

}  // namespace

const std::vector<InstructionSet>& supported_instruction_sets() {
  static const std::vector<InstructionSet> found = probe();
  return found;
}

}  // namespace hydra
