// One model under one budget: its parameters' two faces, its blocks, its window and its gradients.
//
// The Python side decides what the blocks are and hooks modules; everything per tensor happens here. Life:
// add_block() for every block, then windows, then close(). A window is what one thread's outermost forward or
// backward opens and the last thread inside closes; passes, swaps and version checks happen at those edges.
//
// Threads: windows may be entered from any thread, one edge at a time (gate_). Calls marked "lock" need the
// interpreter lock and release it while they wait; the others are made without it.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/memory/tracked_resource.h"
#include "csrc/optim/deferred_update.h"
#include "csrc/paging/pager.h"
#include "csrc/pytorch/gradients/gradient_gathering.h"
#include "csrc/pytorch/gradients/gradient_sink.h"
#include "csrc/pytorch/homes/device_homes.h"
#include "csrc/pytorch/homes/disk_homes.h"
#include "csrc/pytorch/homes/weight_loans.h"
#include "csrc/pytorch/memory/counting_allocator.h"
#include "csrc/pytorch/model/graph_marks.h"
#include "csrc/pytorch/parameters/block_backing.h"
#include "csrc/pytorch/parameters/derived_page.h"
#include "csrc/pytorch/parameters/tensor_plan.h"
#include "csrc/pytorch/parameters/update_hold.h"
#include "csrc/pytorch/parameters/window.h"
#include "csrc/pytorch/parameters/withheld.h"

namespace hydra {

using BlockList = std::vector<std::int32_t>;

struct PagedModelOptions {
  Bytes budget = 0;
  c10::Device device = c10::Device(c10::kCPU);  // where faces live; cpu on the simulated device
  std::optional<at::ScalarType> face_dtype;     // of floating-point faces; the host's unless set
  std::optional<at::ScalarType> gradient_dtype;
  Bytes gradient_bound = 0;
  bool poison_hosts = false;
  bool fault_path = true;
};

/// What a thread takes into a window and gives back on leaving it. It knows whether the window was entered, so
/// that the caller can make it first and leave in a `finally`, wherever an interrupt arrives.
struct WindowToken {
  bool entered = false;
  std::thread::id thread;
  std::int64_t thread_depth = 0;
  ThreadCharge charge;  // the thread's before
  PassKind kind = PassKind::kForward;
  std::weak_ptr<const void> graph{};        // of what a forward returned
  std::optional<std::int64_t> gradients{};  // before a backward inside the model's own forward
};

/// One block's part of an optimizer step, or that of several whose weights overlap, and the tensors that it reads and
/// writes.
struct BlockUpdate {
  BlockList blocks;
  TensorPlan plan;
  std::vector<at::Tensor> tensors;
};

/// What the device held when a pass reached a block.
struct MemorySample {
  PassKind kind = PassKind::kForward;
  std::int32_t block = 0;
  MemoryUse use;
};

/// One call of a module that uses blocks; a window of its own if its thread is inside none.
struct SiteVisit {
  WindowToken window;
  BlockList blocks;  // those pinned
  Activity::Time begin{};
};

class PagedModel;

/// In place, as mul_(); wherever the home of this `.grad` is.
void scale_gradient(const at::Tensor& gradient, double factor);

/// The windows of several models, of one pass: entered and left together.
class Windows {
 public:
  Windows(std::vector<std::shared_ptr<PagedModel>> models, PassKind kind) : models_(std::move(models)), kind_(kind) {}

  /// Lock. All or none.
  void enter();
  /// Lock. Leaves those entered, all of them; throws the first error.
  void exit(bool failed);

 private:
  std::vector<std::shared_ptr<PagedModel>> models_;
  PassKind kind_;
  std::vector<WindowToken> entered_;
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
  /// Buffers that live on the device until close(), where no allocator of the device counts them.
  void charge_buffers(Bytes bytes);
  /// Faces in the order parameters were added.
  std::vector<at::Tensor> faces() const;
  Window& window() noexcept { return window_; }
  Pager& pager() noexcept { return *pager_; }

  /// Lock. Opens the window if no thread is inside.
  void enter(WindowToken& token, PassKind kind);
  /// Lock. A forward returns these. What its thread allocates afterwards still belongs to this model (the loss),
  /// until backward ends or nothing is left of their graph.
  void returns(WindowToken& token, const std::vector<at::Tensor>& outputs);
  /// Lock. Restores the depth the thread had at enter(); closes the window when the last thread leaves. Throws what
  /// went wrong on the lanes, unless `failed` says that another error is on its way. Does nothing with a token that
  /// entered no window.
  void exit(WindowToken& token, bool failed);

  /// Lock. A module that uses these blocks is called, returns. All blocks or none.
  void begin_visit(SiteVisit& visit, const BlockList& blocks, PassKind kind);
  void returns(SiteVisit& visit, const std::vector<at::Tensor>& outputs);
  void end_visit(SiteVisit& visit, bool failed);
  /// Backward has reached these blocks: those before are unpinned, these pinned, until the window closes or
  /// the next ones are reached. Nothing happens after close().
  void arrive_backward(const BlockList& blocks);

  /// A round's microbatches run through these blocks until the next call, or until the window closes. Meanwhile
  /// they are pinned, reaching them is no news, and in a backward their gradients are gathered on the device.
  void stay_in(const BlockList& blocks, PassKind kind);
  /// Lets go of the low-precision copies of the blocks stayed in: the next microbatch makes its own.
  void drop_copies();
  /// Backwards inside a forward's stay, until the next one: what they accumulate is kept on the device for the first
  /// stay of the backward. It is dropped with a forward that fails, and by drop_early().
  void begin_early() { gathering_.begin_early(); }
  bool may_accumulate_early(const at::Tensor& leaf) const;
  void drop_early() noexcept { gathering_.drop_carried(); }
  /// Runs the post-accumulate hooks of parameters that one microbatch's backward has brought gradients to.
  void run_hooks() { sink_->run_hooks(/*failed=*/false); }

  /// Takes what was gathered of a block's gradients and is all there is of them, by parameter, or copies what is at
  /// home on the device; undefined elsewhere.
  std::vector<at::Tensor> take_gathered(std::int32_t block);
  /// Nothing is to be added to the block's gradients any more in this window: that throws from now on. Returns which
  /// of them backward has brought, wholly or in part, since they were last settled; the others are as they were.
  /// Blocks until those on their way are home.
  std::vector<bool> settle_gradients(std::int32_t block);
  /// What take_gathered() gave has become this, which is the whole gradient from now on.
  void return_gathered(std::int32_t block, std::size_t index, at::Tensor gradient);
  /// Names of parameters that were written to since the window opened, or last was open; empty if none.
  std::string moved_hosts() const;
  /// Whether some thread is inside a backward.
  bool in_backward() const { return window_.in_backward(); }

  /// Where weights have several versions, each with blocks of its own: passes that begin from now on are of this one.
  void expect_version(int version) noexcept { version_ = version; }

  /// Brings the host's bytes up to date in every slot before the next use, whatever the versions say.
  void refresh();
  /// Outside windows: brings one block up to date for an operation that met its face.
  void synchronise_for_fault(std::int32_t block);
  /// The optimizer has written: what is trained, or has a gradient, is stale.
  void note_optimizer_step();
  void note_face_written(const Page& page);

  /// Lets an optimizer step run while the model goes on, blocks in this order; see DeferredUpdate. Until a block is
  /// done its tensors are withheld, and its fills wait. Blocks whose storages other tensors share are updated on
  /// return. Outside windows.
  void defer_update(std::vector<BlockUpdate> updates, std::shared_ptr<ThreadPool> pool, float scale);
  /// Blocks until the block, or all, is updated, and gives tensors back.
  void finish_update(std::int32_t block);
  void finish_update();
  /// As the first, of all blocks that use the storage.
  void finish_update(std::int32_t block, const c10::Storage& storage);
  /// Groups of blocks whose parameters overlap in memory; their updates have to be made in the optimizer's order. Of
  /// `others`, parameters outside the model, the block is -1.
  std::vector<BlockList> overlapping_blocks(const std::vector<at::Tensor>& others) const;
  /// Optimizer steps that were deferred, how long their threads worked, and what they have read and written.
  std::int64_t deferred_updates() const;
  double update_seconds() const;
  /// How long others than the lanes waited for them.
  double update_wait_seconds() const;
  Bytes update_bytes() const;

  /// Moves a block and its optimizer's `state` to the device, their home from now on; see DeviceHomes. False when they
  /// cannot go there. Outside windows.
  bool settle(std::int32_t block, const std::vector<at::Tensor>& state);
  /// Blocks until these host tensors, or all, have their bytes: updated, and at home on the host.
  void bring_home(std::int32_t block);
  void bring_home();
  /// As the second, but what is on the disk stays there.
  void bring_home_from_device();
  /// As the first, for all blocks that use this storage; but of what is on the disk only what it has there.
  void bring_home(std::int32_t block, const c10::Storage& storage);
  /// Runs a block's part of an optimizer step: on the device if that is its home, now on the host if it is not.
  void update_at_home(const BlockUpdate& update, ThreadPool& pool, float scale);
  DeviceHomes& homes() noexcept { return homes_; }

  /// Tensors may have their home on the disk, in this folder, where there is room for extents of these bytes. Once; see
  /// DiskHomes. `files`: the system's if null.
  void open_disk(const std::string& folder, const std::vector<Bytes>& sizes, std::shared_ptr<FileOperations> files);
  /// The disk becomes the home of the block's `state`, or of its weights: false if they cannot go there. Outside
  /// windows.
  void settle_on_disk(std::int32_t block, const std::vector<at::Tensor>& state);
  bool settle_weights_on_disk(std::int32_t block);
  /// From now on the block's gradients go to the disk when backward has left it; so many bytes may be on their way.
  void send_gradients_to_disk(std::int32_t block, Bytes backlog);
  /// A tensor of the optimizer's state; see DiskHomes::make().
  at::Tensor make_on_disk(std::int32_t block, const at::Tensor& like, at::ScalarType dtype, bool copies);
  /// A copy of a tensor that is on the disk, whose home stays there; undefined if it is not.
  at::Tensor read_from_disk(const at::Tensor& tensor);
  /// In place; false if the gradient is not on the disk.
  bool scale_on_disk(const at::Tensor& gradient, double factor);
  /// Weights that may be on their way from the disk at once, and so take host memory.
  /// Of one lane, in two classes of priority, and what is read ahead.
  std::size_t disk_fills() const { return 2 * backend_->to_device().in_flight() + WeightLoans::kAhead; }
  DiskStatistics disk_statistics() const;
  /// Null where there is none.
  DiskHomes* disk() noexcept { return disk_.get(); }

  /// Lock. Ends it all, an open window first: lanes drained, slots given back, faces absent for ever. Idempotent.
  void close();

  /// From now on every arrival at a block is noted, as long as there is room for `samples` more.
  void record_timeline(std::size_t samples);
  std::vector<MemorySample> timeline() const;

  /// Where the run is, what the device holds, and what to change: the second half of an out-of-memory message.
  std::string explain() const;
  GraphMarks& marks() noexcept { return marks_; }
  DerivedPages& derived_pages() noexcept { return derived_pages_; }
  Account& account() noexcept { return *account_; }
  AccumulatingSink& sink() noexcept { return *sink_; }
  const HostArena& arena() const noexcept { return *arena_; }
  DeviceBackend& backend() noexcept { return *backend_; }
  /// Bytes of parameters that could not be moved into the arena.
  Bytes foreign_bytes() const noexcept;
  /// Low-precision copies that were dropped, to be cast anew.
  std::int64_t dropped_copies() const noexcept { return dropped_copies_; }
  ResourceStatistics slot_statistics() const noexcept { return tracked_->statistics(); }
  bool poisons_hosts() const noexcept { return options_.poison_hosts; }
  bool closed() const noexcept { return closed_; }
  bool window_open() const { return window_.depths().total > 0; }

 private:
  /// What the calling thread's allocations on the host are charged to: the simulated device's memory is there.
  AccountPtr thread_account() const { return options_.device.is_cpu() ? account_ : nullptr; }
  void arrive(const BlockList& blocks, PassKind kind);
  void leave(const BlockList& blocks) noexcept;
  void note_timeline(std::int32_t block, PassKind kind);
  /// For the activity log: compute has been in these blocks since then; what the device holds now.
  void note_compute(const BlockList& blocks, Activity::Time begin) noexcept;
  void note_memory() noexcept;
  void open_window(PassKind kind);
  void close_window(bool failed);
  void reveal_hosts() noexcept;
  /// What the forward did to faces without touching their bytes, done to the hosts: `requires_grad`, and `.data`
  /// replaced. Says what could not be done.
  std::string settle_faces();
  void synchronise_hosts();
  /// False: what it found is added to `mismatches`.
  bool synchronise(HostParameter& parameter, bool all_stale, std::string& mismatches);
  /// What one parameter's version or optimizer tells is true of all that have its memory.
  void spread_moves();
  /// Slots have older bytes than these, whichever parameters they are of.
  void mark_moved(std::vector<HostExtent> written);
  /// Between windows, one block alone. False if parameters differ from what they were.
  bool synchronise_block(std::int32_t block);
  /// Of a block whose home is the device: its slot is never stale.
  void synchronise_home(const BlockBacking& backing);
  /// The face is trained if the host is.
  void follow_training(HostParameter& parameter);
  /// On a device whose allocator cannot wait for room, homes make it in time.
  void keep_headroom();
  void restore_charge(WindowToken& token, bool failed);
  /// A gradient that has stayed on the device goes to its home.
  void hand_over(HostParameter& parameter, at::Tensor gradient);
  void reopen_gradients() noexcept;
  /// Backward has left these blocks, whose gradients go to the disk once those of others have come.
  void note_left(const BlockList& blocks);
  void store_left_gradients(std::size_t leave);
  /// At the end of a backward: all that is on the host.
  void store_gradients();
  void store_gradients_of(std::int32_t block);
  /// Blocks whose parameters were given other bytes have the rest on the host, too.
  void review_disk();
  /// Throws StateError in a forked child, if there is a disk: no thread is there to read it.
  void expect_disk_here() const;
  /// Gives back the room on the disk, threads and memory; what was counted stays known. Nothing in a forked child.
  void close_disk() noexcept;
  void expect_unmoved_hosts() const;
  /// Gradients that were assigned to faces by hand go where the others go.
  void collect_assigned_gradients();
  DeferredUpdate::Part part_of(const BlockUpdate& update) const;
  /// Gives back what is updated.
  void settle_update();
  /// Gives back what will never be updated.
  void abandon_update() noexcept;
  void give_back_locked(std::int32_t block, UpdateHold::Departed& departed) noexcept;
  void give_all_back_locked(UpdateHold::Departed& departed) noexcept;
  /// What the update reads and writes, which it is noted to do.
  UpdateHold::Share share_of(const BlockUpdate& update);
  /// Adds how many references to storages the model itself keeps.
  void add_references_kept(UpdateHold::ReferenceCounts& kept) const;
  void note_update_wait(Activity::Time begin, double seconds, std::int32_t block);
  /// The hosts hold what the forward wrote to faces.
  void note_written_home();
  BlockList exchange_backward_blocks(BlockList next);
  bool stays_in(const BlockList& blocks) const;
  void end_stay() noexcept;
  BlockList stays() const;
  BlockList exchange_stays(BlockList next);

  std::shared_ptr<DeviceBackend> backend_;
  std::shared_ptr<HostArena> arena_;
  PagedModelOptions options_;
  AccountPtr account_;
  std::unique_ptr<TrackedResource> tracked_;
  std::unique_ptr<Resource> slots_;
  std::unique_ptr<Resource> state_memory_;
  std::vector<std::unique_ptr<HostParameter>> parameters_;
  std::vector<BlockBacking*> backings_;  // owned by the pager
  std::vector<std::string> block_names_;
  std::unique_ptr<Pager> pager_;
  std::shared_ptr<void> service_;
  std::unique_ptr<AccumulatingSink> sink_;
  GradientGathering gathering_;
  DeviceHomes homes_;
  const HomeProcess home_;
  std::unique_ptr<DiskHomes> disk_;
  DiskStatistics disk_used_;  // once it is closed, and in a forked child
  std::shared_ptr<WeightLoans> loans_;
  std::shared_ptr<HostBuffers> gradient_buffers_;
  Bytes gradient_backlog_ = 0;
  std::mutex leaving_mutex_;  // one thread at a time stores gradients
  std::deque<std::int32_t> left_;
  DerivedPages derived_pages_;
  GraphMarks marks_;
  Window window_;

  mutable std::mutex timeline_mutex_;
  std::size_t timeline_room_ = 0;
  std::vector<MemorySample> timeline_;

  mutable std::mutex update_mutex_;
  std::shared_ptr<DeferredUpdate> update_;
  UpdateHold hold_;  // what update_ reads and writes
  std::int64_t deferred_updates_ = 0;
  double update_seconds_ = 0.0;  // of those that have ended
  double update_wait_seconds_ = 0.0;
  Bytes update_bytes_ = 0;  // likewise

  std::mutex gate_;
  mutable std::mutex backward_mutex_;
  BlockList backward_blocks_;
  BlockList stays_;
  Activity::Time backward_begin_{};  // of the blocks above, for the activity log
  Activity::Time stays_begin_{};
  std::atomic<std::int32_t> latest_block_{-1};
  std::atomic<std::int64_t> dropped_copies_{0};
  std::atomic<bool> all_stale_{false};
  std::atomic<bool> closed_{false};
  PassKind open_kind_ = PassKind::kForward;
  std::atomic<int> version_{0};
  Bytes buffer_bytes_ = 0;
};

}  // namespace hydra
