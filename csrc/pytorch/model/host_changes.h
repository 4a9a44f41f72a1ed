// Tracks writes to one model's parameters, on the host and on the device, and brings the other side up to date.
//
// Writes to hosts make slots stale. A write to one parameter is a write to all that share its memory, here or in
// another model. Writes to faces come home when the window closes. If hosts are poisoned, their bytes are kept
// elsewhere while a window is open. Logs have the numbers that a step overwrites, to undo it.
// Threads: one at a time at the edges of windows, under the gate; refresh(), note_face_written(), note_host_written(),
// log_overwritten(), note_entry() and synchronise_for_fault() on any.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/base/process.h"
#include "csrc/paging/pager.h"
#include "csrc/pytorch/homes/block_homes.h"
#include "csrc/pytorch/model/gradient_path.h"
#include "csrc/pytorch/model/overwritten_log.h"

namespace hydra {

class HostChanges {
 public:
  HostChanges(ModelBlocks& blocks, Pager& pager, BlockHomes& homes, GradientPath& gradients, WindowGate& gate,
              bool poisons)
      : blocks_(blocks), pager_(pager), homes_(homes), gradients_(gradients), gate_(gate), poisons_(poisons) {}

  /// Makes every slot stale at the next synchronise(), even if versions show no write.
  void refresh() noexcept { all_stale_ = true; }
  /// Notes that an optimizer has written all parameters that are trained or have a gradient.
  void note_optimizer_step();
  /// Returns the names of parameters that were written since they were last synchronised; empty if none.
  std::string moved() const;

  /// Makes the slots of written parameters stale, so that they are filled again before their next use. Throws
  /// ModelChanged if a parameter has changed in other ways. Called at the opening of a window.
  void synchronise();
  /// Does the same for one block, between windows. Returns false if a parameter has changed in other ways.
  bool synchronise(std::int32_t block);
  /// Does the same outside windows for an operation that met the block's face.
  void synchronise_for_fault(std::int32_t block);

  /// Notes that an operation writes this face.
  void note_face_written(const Page& page);
  /// Notes that the hosts now have the bytes that the forward wrote to faces.
  void note_written_home();
  /// Applies to hosts what the forward changed on faces other than their bytes: `requires_grad`, and `.data` that was
  /// replaced. Returns a description of changes that could not be applied.
  std::string apply_faces();

  /// Notes that an operation is about to write this host.
  void note_host_written(const HostParameter& parameter);

  /// Returns a log of what is overwritten from now on. `is_own`: whether the step that needs it trains this model.
  std::shared_ptr<OverwrittenLog> log_overwritten(bool is_own);
  /// Notes for logs that this thread enters the model.
  void note_entry();

  /// Tells other models to stop looking for writes to this model's memory, because it closes.
  void forget() noexcept;

  bool poisons() const noexcept { return poisons_; }
  /// Poisons the hosts until reveal(), if this model poisons them. Called when the window opens.
  void conceal();
  void reveal() noexcept;

 private:
  /// Returns whether the parameter was written. Adds other changes to `mismatches`.
  bool synchronise(HostParameter& parameter, bool all_stale, std::string& mismatches);
  /// Returns whether any of the block's parameters was written.
  bool synchronise(const BlockBacking& backing, bool all_stale, std::string& mismatches);
  /// Synchronises a block whose home is the device: its slot is never stale.
  void synchronise_home(const BlockBacking& backing);
  /// Trains the face if the host is trained.
  void follow_training(HostParameter& parameter);
  /// Marks all parameters that share memory with a written one as written.
  void spread_moves();
  /// Marks all parameters whose memory overlaps these extents as written.
  void mark_moved(std::vector<HostExtent> written);
  std::vector<std::shared_ptr<OverwrittenLog>> logs();
  /// Copies the parameter's numbers, which are those of `source`, for logs of this thread that do not have it.
  void log(const HostParameter& parameter, const at::Tensor& source);

  ModelBlocks& blocks_;
  Pager& pager_;
  BlockHomes& homes_;
  GradientPath& gradients_;
  WindowGate& gate_;
  const bool poisons_;
  const HomeProcess process_;
  std::atomic<bool> all_stale_{false};
  std::mutex logs_mutex_;
  std::vector<std::weak_ptr<OverwrittenLog>> logs_;
};

}  // namespace hydra
