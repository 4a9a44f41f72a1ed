// Tracks writes to one model's parameters, on the host and on the device, and brings the other side up to date.
//
// Writes to hosts make slots stale. A write to one parameter is a write to all that share its memory, here or in
// another model. Writes to faces come home when the window closes. If hosts are poisoned, their bytes are kept
// elsewhere while a window is open. Logs have the numbers that forwards overwrite, to undo a round.
// Threads: one at a time at the edges of windows, under the gate; refresh(), note_face_written(), log_overwritten() and
// synchronise_for_fault() on any.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/base/process.h"
#include "csrc/paging/pager.h"
#include "csrc/pytorch/homes/block_homes.h"
#include "csrc/pytorch/model/gradient_path.h"

namespace hydra {

/// A parameter that a forward has written to.
struct Overwritten {
  std::string name;
  at::Tensor host;
  at::Tensor before;  // its numbers before the first write, on the host
};

/// What forwards overwrite in the parameters of one model while this exists. Threads: any.
class OverwrittenLog {
 public:
  /// The parameters that were written to since the last call, with their numbers from before the first write.
  std::vector<Overwritten> take();
  bool has(const HostParameter& parameter) const;
  void add(const HostParameter& parameter, const at::Tensor& before);

 private:
  mutable std::mutex mutex_;
  std::map<const HostParameter*, Overwritten> kept_;
};

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

  /// Returns a log of what forwards overwrite from now on.
  std::shared_ptr<OverwrittenLog> log_overwritten();

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
  /// Copies the parameter's numbers, which are those of `source`, for logs that do not have it.
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
