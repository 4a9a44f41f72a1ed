// What is written to one model's parameters, on either side, and what follows from it for the other.
//
// Writes to hosts make slots stale; writes to one parameter are writes to all that have the same memory, here or in
// another model. Writes to faces come home when the window closes. Where hosts are poisoned their bytes are aside while
// a window is open.
// Threads: one at a time at the edges of windows, under the gate; refresh(), note_face_written() and
// synchronise_for_fault() from any.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "csrc/base/process.h"
#include "csrc/paging/pager.h"
#include "csrc/pytorch/homes/block_homes.h"
#include "csrc/pytorch/model/gradient_path.h"

namespace hydra {

class HostChanges {
 public:
  HostChanges(ModelBlocks& blocks, Pager& pager, BlockHomes& homes, GradientPath& gradients, WindowGate& gate,
              bool poisons)
      : blocks_(blocks), pager_(pager), homes_(homes), gradients_(gradients), gate_(gate), poisons_(poisons) {}

  /// Brings the host's bytes up to date in every slot before the next use, whatever the versions say.
  void refresh() noexcept { all_stale_ = true; }
  /// The optimizer has written: what is trained, or has a gradient, is stale.
  void note_optimizer_step();
  /// Names of parameters that were written to since the window opened, or last was open; empty if none.
  std::string moved() const;

  /// Slots get the hosts' bytes that are new, before the next use. Throws ModelChanged if parameters are others.
  void synchronise();
  /// Between windows, one block alone. False if parameters differ from what they were.
  bool synchronise(std::int32_t block);
  /// Outside windows: brings one block up to date for an operation that met its face.
  void synchronise_for_fault(std::int32_t block);

  void note_face_written(const Page& page);
  /// The hosts hold what the forward wrote to faces.
  void note_written_home();
  /// What the forward did to faces without touching their bytes, done to the hosts: `requires_grad`, and `.data`
  /// replaced. Says what could not be done.
  std::string apply_faces();

  /// The model closes: other models need not look for writes to what it had.
  void forget() noexcept;

  bool poisons() const noexcept { return poisons_; }
  /// While the window is open.
  void conceal();
  void reveal() noexcept;

 private:
  /// False: what it found is added to `mismatches`.
  bool synchronise(HostParameter& parameter, bool all_stale, std::string& mismatches);
  /// Whether the block's slot is stale.
  bool synchronise(const BlockBacking& backing, bool all_stale, std::string& mismatches);
  /// Of a block whose home is the device: its slot is never stale.
  void synchronise_home(const BlockBacking& backing);
  /// The face is trained if the host is.
  void follow_training(HostParameter& parameter);
  /// What one parameter's version or optimizer tells is true of all that have its memory.
  void spread_moves();
  /// Slots have older bytes than these, whichever parameters they are of.
  void mark_moved(std::vector<HostExtent> written);

  ModelBlocks& blocks_;
  Pager& pager_;
  BlockHomes& homes_;
  GradientPath& gradients_;
  WindowGate& gate_;
  const bool poisons_;
  const HomeProcess process_;
  std::atomic<bool> all_stale_{false};
};

}  // namespace hydra
