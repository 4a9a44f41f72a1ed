// Which version of a stage's weights a batch uses, in its forwards and in its backwards. It is a function of stage and
// batch alone, so that verifier and runtime always agree, and a drain in between changes nothing.
//
// A stage holds its newest versions in a ring of buffers: the update that makes W(t + 1) overwrites
// W(t + 1 - buffers), which no batch may need any more.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace hydra::schedule {

enum class VersionRule : std::uint8_t {
  kFlush,         // "flush": W(t). One buffer.
  kDelayed,       // "delay-1": W(max(t - 1, 0)) on every stage. Two buffers (PipeDream-2BW, arXiv 2006.09503, 3.1).
  kStashing,      // "stashing": the newest version of stage s of S if each step admits one batch,
                  // W(max(t - (S - 1 - s), 0)). S - s buffers (PipeDream, SOSP'19, 3.3).
  kVerticalSync,  // "vertical-sync": the version that stage 0 would use, W(max(t - (S - 1), 0)). S buffers.
};

const char* name(VersionRule rule) noexcept;
std::optional<VersionRule> rule_named(std::string_view name) noexcept;

/// How many updates batch t does without: it uses W(t - delay). With 0 it waits for the update of batch t - 1.
int delay(VersionRule rule, int stages, int stage) noexcept;
std::int64_t version_of(VersionRule rule, int stages, int stage, std::int64_t batch) noexcept;
/// How many versions of its weights the stage holds.
int buffers(VersionRule rule, int stages, int stage) noexcept;

}  // namespace hydra::schedule
