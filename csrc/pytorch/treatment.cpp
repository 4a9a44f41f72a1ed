#include "csrc/pytorch/treatment.h"

#include <utility>
#include <vector>

namespace hydra {

namespace {

thread_local std::vector<TreatmentPtr> treatments;
thread_local std::vector<std::int32_t> parts;

}  // namespace

void begin_treatment(TreatmentPtr treatment) {
  if (treatment->asks_operators()) {
    begin_following_operators();
  }
  treatments.push_back(std::move(treatment));
}

void end_treatment() noexcept {
  if (treatments.empty()) {
    return;
  }
  if (treatments.back()->asks_operators()) {
    end_following_operators();
  }
  treatments.pop_back();
}

const Treatment& current_treatment() noexcept {
  static const Treatment none;
  return treatments.empty() ? none : *treatments.back();
}

void begin_part(std::int32_t part) { parts.push_back(part); }

void end_part() noexcept {
  if (!parts.empty()) {
    parts.pop_back();
  }
}

std::int32_t current_part() noexcept { return parts.empty() ? kNoPart : parts.back(); }

}  // namespace hydra
