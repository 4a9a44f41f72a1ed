// Which version of a stage's weights a batch uses, in its forwards and in its backwards: a function of stage and batch
// alone, so that verifier and runtime agree without asking each other, and a drain in between changes nothing.
//
// The newest versions of a stage are held in a ring of buffers: the update that makes W(t + 1) writes over
// W(t + 1 - buffers), which no batch may need then.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace hydra::schedule {

enum class VersionRule : std::uint8_t {
  kFlush,         // "flush": W(t). One buffer.
  kDelayed,       // "delay-1": W(max(t - 1, 0)) on every stage. Two buffers (PipeDream-2BW, arXiv 2006.09503, 3.1).
  kStashing,      // "stashing": what stage s of S has when one batch a step is admitted, W(max(t - (S - 1 - s), 0)).
                  // S - s buffers (PipeDream, SOSP'19, 3.3).
  kVerticalSync,  // "vertical-sync": what stage 0 would use, W(max(t - (S - 1), 0)). S buffers.
};

const char* name(VersionRule rule) noexcept;
std::optional<VersionRule> rule_named(std::string_view name) noexcept;

/// Batches between that whose update made the version that batch t uses, and t: 0 where batch t waits for t - 1's.
int delay(VersionRule rule, int stages, int stage) noexcept;
std::int64_t version_of(VersionRule rule, int stages, int stage, std::int64_t batch) noexcept;
/// Versions of a stage that are held.
int buffers(VersionRule rule, int stages, int stage) noexcept;

}  // namespace hydra::schedule
