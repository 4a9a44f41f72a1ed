// Counts a stash's memory on the device, decides how much more may be there, and foresees a pass from the one before.
//
// Threads: one at a time; the index's mutex guards it (interval_index.h).
#pragma once

#include <optional>

#include "csrc/base/types.h"
#include "csrc/pytorch/stash/treatment.h"

namespace hydra {

/// A pass of a stash: from the first saved interval until none is left.
struct StashPass {
  std::int64_t number = 0;  // from 1 on
  Bytes saved_bytes = 0;    // bytes of all intervals
  Bytes peak_bytes = 0;     // the most on the device at one time

  // Of the intervals that may leave, and may stay:
  Bytes raw_bytes = 0;   // their bytes when they were saved
  Bytes form_bytes = 0;  // the bytes of their forms
};

/// What happens to an interval as soon as it is saved.
struct DeparturePlan {
  Staying staying = Staying::kWhileRoom;  // if it may leave
  bool leaves_at_once = false;            // by the last pass, later intervals will need the whole budget
  bool encodes_at_once = false;
};

class DeviceRoom final {
 public:
  struct Usage {
    Bytes resident = 0;  // bytes of intervals that have to stay
    Bytes held = 0;      // bytes of all other intervals
    Bytes peak_held = 0;
  };

  /// Without a budget the stash holds only what transfers need: twice the largest interval, or an eighth of the last
  /// pass, whichever is more.
  explicit DeviceRoom(std::optional<Bytes> budget) : budget_(budget) {}

  /// Intervals that were planned for before keep their plan.
  void set_budget(std::optional<Bytes> budget) noexcept { budget_ = budget; }
  bool has_room(Bytes bytes) const noexcept;
  /// Whether `bytes` more may come back ahead of their use. Without a budget, only as much as the largest interval, or
  /// an eighth of the last pass, may be there ahead of its use. After note_given_up() no more than was there then, and
  /// an eighth of what is read meanwhile: so little is brought twice.
  bool may_come_ahead(Bytes bytes) const noexcept;
  /// Whether intervals that the host has too stay on the device.
  bool keeps_copies() const noexcept { return budget_ && has_room(0); }
  const Usage& usage() const noexcept { return usage_; }

  void note_saved(Bytes bytes) noexcept { pass_.saved_bytes += bytes; }
  /// Counts a new interval that may leave, and plans for it. One that never stays takes no room from the others.
  DeparturePlan plan(Bytes raw_bytes, Staying staying) noexcept;
  void hold(Bytes bytes, bool is_resident) noexcept;
  void free(Bytes bytes, bool is_resident, bool was_asked_for) noexcept;
  /// Counts held bytes that backward has read: it will read other intervals next.
  void note_asked_for(Bytes bytes) noexcept;
  /// An allocation has taken the memory of an interval that was there ahead of its use.
  void note_given_up() noexcept { most_ahead_ = ahead(); }
  void note_new_form(Bytes before, Bytes after) noexcept { pass_.form_bytes += after - before; }
  /// Updates the pass's peak. Called when room has been made.
  void note_peak() noexcept;
  /// Ends the pass, because no interval is left.
  void end_pass() noexcept;
  /// The last pass that has ended.
  const std::optional<StashPass>& last_pass() const noexcept { return last_pass_; }

 private:
  Bytes share_of_pass() const noexcept;
  Bytes ahead() const noexcept { return usage_.held - asked_for_; }

  std::optional<Bytes> budget_;
  Usage usage_;
  Bytes asked_for_ = 0;              // held bytes that backward has read
  std::optional<Bytes> most_ahead_;  // in this pass, since memory was given up
  Bytes largest_ = 0;
  StashPass pass_{.number = 1};
  std::optional<StashPass> last_pass_;
};

}  // namespace hydra
