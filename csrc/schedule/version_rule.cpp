#include "csrc/schedule/version_rule.h"

#include <algorithm>
#include <array>

namespace hydra::schedule {

namespace {

constexpr std::array kRules = {VersionRule::kFlush, VersionRule::kDelayed, VersionRule::kStashing,
                               VersionRule::kVerticalSync};

}  // namespace

const char* name(VersionRule rule) noexcept {
  switch (rule) {
    case VersionRule::kFlush:
      return "flush";
    case VersionRule::kDelayed:
      return "delay-1";
    case VersionRule::kStashing:
      return "stashing";
    case VersionRule::kVerticalSync:
      return "vertical-sync";
  }
  return "?";
}

std::optional<VersionRule> rule_named(std::string_view text) noexcept {
  const auto* found = std::ranges::find_if(kRules, [&](VersionRule rule) { return text == name(rule); });
  return found == kRules.end() ? std::nullopt : std::optional(*found);
}

int delay(VersionRule rule, int stages, int stage) noexcept {
  switch (rule) {
    case VersionRule::kFlush:
      return 0;
    case VersionRule::kDelayed:
      return 1;
    case VersionRule::kStashing:
      return stages - 1 - stage;
    case VersionRule::kVerticalSync:
      return stages - 1;
  }
  return 0;
}

std::int64_t version_of(VersionRule rule, int stages, int stage, std::int64_t batch) noexcept {
  return std::max<std::int64_t>(batch - delay(rule, stages, stage), 0);
}

int buffers(VersionRule rule, int stages, int stage) noexcept { return delay(rule, stages, stage) + 1; }

}  // namespace hydra::schedule
