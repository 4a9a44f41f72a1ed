#include "csrc/pytorch/stash/device_room.h"

#include <algorithm>
#include <utility>

namespace hydra {

bool DeviceRoom::has_room(Bytes bytes) const noexcept {
  const Bytes wanted = usage_.held + bytes;
  return budget_ ? usage_.resident + wanted <= *budget_ : wanted <= std::max(2 * largest_, share_of_pass());
}

bool DeviceRoom::may_come_ahead(Bytes bytes) const noexcept {
  const Bytes wanted = ahead() + bytes;
  if (most_ahead_ && wanted > *most_ahead_) {
    return false;
  }
  return budget_ ? has_room(bytes) : wanted <= std::max(largest_, share_of_pass());
}

void DeviceRoom::note_asked_for(Bytes bytes) noexcept {
  constexpr Bytes kRegrowth = 8;
  asked_for_ += bytes;
  if (most_ahead_) {
    *most_ahead_ += bytes / kRegrowth;
  }
}

Bytes DeviceRoom::share_of_pass() const noexcept {
  constexpr Bytes kShare = 8;
  return (last_pass_ ? last_pass_->form_bytes : pass_.form_bytes) / kShare;
}

DeparturePlan DeviceRoom::plan(Bytes raw_bytes, Staying staying) noexcept {
  largest_ = std::max(largest_, raw_bytes);
  if (staying == Staying::kNever) {
    return {.staying = staying, .leaves_at_once = true, .encodes_at_once = true};
  }
  const Bytes before = pass_.form_bytes;
  const Bytes known = last_pass_ ? last_pass_->form_bytes : 0;
  // The bytes to come, going by the last pass. If this pass is longer already, all of its bytes so far.
  const Bytes to_come = before < known ? known - before : before + raw_bytes;
  pass_.raw_bytes += raw_bytes;
  pass_.form_bytes += raw_bytes;
  return {.staying = staying,
          .leaves_at_once = !budget_ || !last_pass_ || to_come > *budget_,
          .encodes_at_once = !budget_ || !last_pass_ || last_pass_->raw_bytes > *budget_};
}

void DeviceRoom::hold(Bytes bytes, bool is_resident) noexcept {
  (is_resident ? usage_.resident : usage_.held) += bytes;
  usage_.peak_held = std::max(usage_.peak_held, usage_.held);
}

void DeviceRoom::free(Bytes bytes, bool is_resident, bool was_asked_for) noexcept {
  (is_resident ? usage_.resident : usage_.held) -= bytes;
  asked_for_ -= was_asked_for ? bytes : 0;
}

void DeviceRoom::note_peak() noexcept { pass_.peak_bytes = std::max(pass_.peak_bytes, usage_.held + usage_.resident); }

void DeviceRoom::end_pass() noexcept {
  const std::int64_t next = pass_.number + 1;
  last_pass_ = std::exchange(pass_, StashPass{.number = next});
  most_ahead_.reset();
}

}  // namespace hydra
