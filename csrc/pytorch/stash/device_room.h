// How much of what a stash has saved may be on the device, how much is there, and what the last pass tells of this one.
//
// Threads: one at a time; the index's mutex guards it (interval_index.h).
#pragma once

#include <optional>

#include "csrc/base/types.h"

namespace hydra {

/// From when nothing was saved until there was nothing again.
struct StashPass {
  std::int64_t number = 0;  // from 1 on
  Bytes saved_bytes = 0;    // of intervals
  Bytes peak_bytes = 0;     // on the device, at one time

  // Of those that may leave:
  Bytes raw_bytes = 0;
  Bytes form_bytes = 0;
};

/// What becomes of an interval as soon as it is saved.
struct DeparturePlan {
  bool leaves_at_once = false;  // what comes after it in this pass will need all the room, as far as is known
  bool encodes_at_once = false;
};

class DeviceRoom final {
 public:
  struct Usage {
    Bytes resident = 0;  // of intervals that are not to leave
    Bytes held = 0;      // of the others
    Bytes peak_held = 0;
  };

  /// Without a budget as little as transfers need is held: twice the largest interval, or an eighth of the last pass.
  explicit DeviceRoom(std::optional<Bytes> budget) : budget_(budget) {}

  bool has_room(Bytes bytes) const noexcept;
  /// Whether so much more may come back ahead of time. Without a budget one of the largest intervals, or an eighth of
  /// the last pass, is on its way.
  bool may_come_ahead(Bytes bytes) const noexcept;
  /// Whether what the host has, too, stays on the device.
  bool keeps_copies() const noexcept { return budget_ && has_room(0); }
  const Usage& usage() const noexcept { return usage_; }

  void note_saved(Bytes bytes) noexcept { pass_.saved_bytes += bytes; }
  /// For the newest one that may leave.
  DeparturePlan plan(Bytes raw_bytes) noexcept;
  void hold(Bytes bytes, bool is_resident) noexcept;
  void free(Bytes bytes, bool is_resident, bool was_asked_for) noexcept;
  /// Other intervals will be asked for next.
  void note_asked_for(Bytes bytes) noexcept { asked_for_ += bytes; }
  void note_new_form(Bytes before, Bytes after) noexcept { pass_.form_bytes += after - before; }
  /// Of what is there now, with room made for it.
  void note_peak() noexcept;
  /// Nothing is saved any more.
  void end_pass() noexcept;
  /// The last one that has ended.
  const std::optional<StashPass>& last_pass() const noexcept { return last_pass_; }

 private:
  Bytes share_of_pass() const noexcept;

  const std::optional<Bytes> budget_;
  Usage usage_;
  Bytes asked_for_ = 0;  // of what is held
  Bytes largest_ = 0;
  StashPass pass_{.number = 1};
  std::optional<StashPass> last_pass_;
};

}  // namespace hydra
