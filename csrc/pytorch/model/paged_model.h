// One model under one budget: it owns the parts that page it, and gives access to them.
//
// The Python side chooses the blocks and hooks modules; the parts do everything that concerns tensors. Lifetime:
// add_block() for every block, then windows, then close(). A window is opened by one thread's outermost forward or
// backward and closed by the last thread inside; passes, swaps and version checks happen at those edges.
//
// A part refers only to parts declared before it; the last refers to all. They are destroyed in the opposite order,
// after close(). From then on no lane, hook or callback of a device's allocator calls any of them.
//
// Threads: windows may be entered from any thread; each part has a contract of its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/pytorch/model/arrivals.h"
#include "csrc/pytorch/model/gradient_path.h"
#include "csrc/pytorch/model/home_moves.h"
#include "csrc/pytorch/model/host_changes.h"
#include "csrc/pytorch/model/model_memory.h"
#include "csrc/pytorch/model/model_window.h"
#include "csrc/pytorch/model/pending_update.h"
#include "csrc/pytorch/model/round_stay.h"
#include "csrc/pytorch/stash/stash.h"

namespace hydra {

struct PagedModelOptions {
  Bytes budget = 0;
  c10::Device device = c10::Device(c10::kCPU);   // the faces' device; cpu on the simulated device
  std::optional<at::ScalarType> face_dtype;      // of floating-point faces; by default the host's
  std::optional<at::ScalarType> gradient_dtype;  // in which gradients cross the lane; by default their own
  Bytes gradient_bound = 0;                      // the most bytes of gradients on their way at once; 0 sets no bound
  bool poison_hosts = false;
  bool fault_path = true;
  std::shared_ptr<Stash> stash;  // of the tensors that the model saves, on the same backend; it makes room for others
};

class PagedModel : public std::enable_shared_from_this<PagedModel> {
 public:
  PagedModel(std::shared_ptr<DeviceBackend> backend, std::shared_ptr<HostArena> arena,
             const PagedModelOptions& options);
  ~PagedModel();
  PagedModel(const PagedModel&) = delete;
  PagedModel& operator=(const PagedModel&) = delete;

  /// Makes faces for the parameters and moves their bytes into the arena. Returns the block's number.
  std::int32_t add_block(std::string name, const std::vector<std::pair<std::string, at::Tensor>>& parameters);
  /// Closes an open window, brings all blocks home, drains the lanes and returns the slots. Faces are absent from now
  /// on. Idempotent.
  void close();

  WindowGate& gate() noexcept { return gate_; }
  ModelMemory& memory() noexcept { return memory_; }
  ModelBlocks& blocks() noexcept { return blocks_; }
  Pager& pager() noexcept { return pager_; }
  BlockHomes& homes() noexcept { return homes_; }
  GradientPath& gradients() noexcept { return gradients_; }
  PendingUpdate& update() noexcept { return update_; }
  HostChanges& changes() noexcept { return changes_; }
  HomeMoves& moves() noexcept { return moves_; }
  Arrivals& arrivals() noexcept { return arrivals_; }
  RoundStay& rounds() noexcept { return rounds_; }
  ModelWindow& window() noexcept { return window_; }

 private:
  /// The functions refer to parts declared after the pager, so the pager calls none before blocks are used.
  PagerOptions pager_options(const PagedModelOptions& options);

  WindowGate gate_;
  ModelMemory memory_;
  ModelBlocks blocks_;
  Pager pager_;
  BlockHomes homes_;
  GradientPath gradients_;
  PendingUpdate update_;
  HostChanges changes_;
  HomeMoves moves_;
  Arrivals arrivals_;
  RoundStay rounds_;
  ModelWindow window_;
};

}  // namespace hydra
