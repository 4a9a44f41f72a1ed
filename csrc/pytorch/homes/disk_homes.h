// Weights, gradients and optimizer state whose home is the disk: their bytes are on the host only while they are
// worked on.
//
// An extent holds one tensor of a state, one gradient, or all weights of a block, laid out as the block's slot is. The
// tensors that the user knows have no bytes meanwhile; an operation on one of them brings its extent home to the host.
// A deferred update borrows a block's extents: they are read into working memory, ahead of the update where there is
// room, and written back behind it, gradients excepted. There are kWorkingSets such memories, each as large as the
// largest block needs. Fills read weights into memory of their own (WeightLoans), unless an update has just left them
// in its. Tensors of state, and gradients, below kLeastDiskBytes stay on the host.
//
// Threads: any; two mutexes. The one that guards what is where is never held while waiting. Calls that wait are made
// without the interpreter lock. An error of the disk is thrown as SpillError: of a read, to the caller that needed the
// bytes, which may try again; of a write, to the next caller that needs them, since they are lost.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "csrc/pytorch/memory/working_memory.h"
#include "csrc/pytorch/parameters/block_backing.h"
#include "csrc/pytorch/parameters/tensor_plan.h"
#include "csrc/pytorch/parameters/withheld.h"
#include "csrc/transfer/disk_lane.h"

namespace hydra {

enum class DiskRole : std::uint8_t { kState, kWeights, kGradient };
inline constexpr std::size_t kDiskRoles = 3;

struct DiskStatistics {
  std::array<Bytes, kDiskRoles> at_home_bytes{};  // of extents that are a home now, by role
  Bytes working_bytes = 0;                        // of host memory for what is borrowed
  Bytes read_bytes = 0;
  Bytes written_bytes = 0;
  Bytes spared_bytes = 0;     // that fills did not read, since an update had them in memory still
  double wait_seconds = 0.0;  // updates waited for bytes, or for memory
};

class DiskHomes {
 public:
  static constexpr int kWorkingSets = 3;  // one is read, one worked on, one written

  /// Throws SpillError if there can be no file in the folder. What comes home, but for state, comes to `arena`.
  /// `files`: the system's if null.
  DiskHomes(const std::string& folder, std::shared_ptr<HostArena> arena,
            std::shared_ptr<FileOperations> files = nullptr);
  ~DiskHomes();

  /// Room for extents of these bytes. Throws SpillError if the disk has not got it.
  void reserve(const std::vector<Bytes>& sizes);
  /// The disk becomes the home of those of these tensors of a state for which that is worth while. Waits until they are
  /// written. If other state is at home with this block, all of the block's state comes to the host first. What else
  /// knows a tensor's memory, such as an array of numpy's, keeps it, and sees it change no more.
  void settle(std::int32_t block, const std::vector<at::Tensor>& tensors, const std::weak_ptr<PagedModel>& owner);
  /// The disk becomes the home of a block's weights. Waits until they are written. False, and nothing has changed, if
  /// their memory has another owner.
  bool settle_weights(std::int32_t block, BlockBacking& backing, const std::weak_ptr<PagedModel>& owner);
  /// The disk becomes the home of gradients, whose memory is aligned, and as long, as transfers want it. They are being
  /// written on return; while that is more than `backlog` bytes, it is waited for.
  void store_gradients(std::int32_t block, const std::vector<at::Tensor>& gradients,
                       const std::weak_ptr<PagedModel>& owner, Bytes backlog);
  /// Blocks until gradients are written. Throws the first error.
  void expect_gradients();
  /// A tensor of zeros that lies as `like` does and has its home here from the beginning; or one that will be `like`,
  /// in its own type, as it is when it is read first. Nothing is written.
  at::Tensor make(std::int32_t block, const at::Tensor& like, at::ScalarType dtype, bool copies,
                  const std::weak_ptr<PagedModel>& owner);

  /// What the storage has at home here, everything of the block, or of all, is on the host again; nothing happens where
  /// it is.
  void bring_home(std::int32_t block, const c10::Storage& storage);
  void bring_weights_home(std::int32_t block);
  void bring_home(std::int32_t block);
  void bring_home();
  /// What is at home here is lost; its tensors say so from now on.
  void abandon() noexcept;
  /// The bytes of a tensor that may be at home here, in memory of their own; undefined if they are not here. Its home
  /// stays.
  at::Tensor read(std::int32_t block, const at::Tensor& tensor);

  bool holds(const at::Tensor& tensor) const;
  /// Whether the block's weights are at home here.
  bool holds_weights(std::int32_t block) const;

  /// Reads the weights of a block into memory of as many bytes as they have in a slot. Null if they are not here.
  TicketPtr read_weights(std::int32_t block, const ArenaRegionPtr& memory);
  /// Those which an update has left in working memory, while they are being written; null if there are none. Their
  /// holder makes updates wait for memory.
  std::shared_ptr<const std::byte> updated_weights(std::int32_t block);

  /// Where a step finds what it works on: on the host, or so far into working memory.
  struct Places {
    std::unordered_map<const c10::TensorImpl*, void*> on_host;
    std::unordered_map<const c10::TensorImpl*, Bytes> in_memory;
  };
  /// As it is now, whatever tensors are given other memory until the step runs.
  Places places(std::int32_t block, const TensorPlan& plan);
  /// The block's bytes will be borrowed soon: they are read now if there is memory.
  void expect(std::int32_t block);
  /// The plan with addresses in working memory, whose bytes are there until give_back().
  StepPlan borrow(std::int32_t block, const TensorPlan& plan, const Places& places);
  /// They have changed, and are written.
  void give_back(std::int32_t block);
  DiskLane& lane() noexcept { return lane_; }

  DiskStatistics statistics() const;

 private:
  struct Member {
    WithheldTensor tensor;
    Bytes offset = 0;                                                                          // in the extent
    c10::weak_intrusive_ptr<c10::TensorImpl> gradient{c10::intrusive_ptr<c10::TensorImpl>()};  // of a gradient
  };
  /// What an extent holds.
  struct Resting {
    DiskRole role = DiskRole::kState;
    std::int32_t extent = -1;
    std::vector<Member> members{};
    Bytes offset = -1;  // in the working memory of the block; negative if the update under way does not work on it
    bool written = false;
    at::Tensor copy_of{};             // until it is written: what it begins as; zeros if undefined
    BlockBacking* backing = nullptr;  // of weights
  };
  struct Block {
    std::vector<Resting> resting;
    Bytes bytes = 0;                   // of working memory
    ArenaRegionPtr memory;             // while borrowed, or expected to be
    std::vector<TicketPtr> transfers;  // reads into it
    std::weak_ptr<ArenaRegion> being_written;
  };

  /// Weights that were read for one tensor, and are wanted for the next one.
  struct Peek {
    std::int32_t extent = -1;
    ArenaRegionPtr region;
  };

  /// Waits for all of them, and then throws the first error.
  static void wait_for(const std::vector<TicketPtr>& tickets);
  struct Found {
    std::size_t resting = 0;  // its number in the block
    Bytes offset = 0;         // of the storage's bytes in the extent
  };
  std::optional<Found> find_locked(std::int32_t block, const c10::Storage& storage) const;
  void add(std::int32_t block, Resting resting);
  std::int32_t take_extent(Bytes bytes);
  void free_extent(std::int32_t extent);
  /// A gradient that has no other owner any more.
  static bool is_forgotten(const Resting& resting);
  void drop_unused(std::int32_t block);
  bool holds_other_state(std::int32_t block, const std::vector<at::Tensor>& tensors) const;
  /// Those for which `chosen` says so.
  void bring_home_alone(std::int32_t block, const std::function<bool(const Resting&)>& chosen);
  static void give_home(const Resting& resting, const ArenaRegionPtr& region);
  /// What it begins as: the bytes of what it copies.
  static void begin_as(const Resting& resting, void* to, const void* from);
  at::Tensor read_alone(std::int32_t block, const at::Tensor& tensor);
  /// Into memory of its own, with what it begins as if it was never written. The ticket may be null.
  TicketPtr read_extent(std::int32_t block, const Resting& resting, const ArenaRegionPtr& memory);
  static std::vector<Resting> worked_on_locked(const Block& contents);
  void drop_memory(std::int32_t block);
  void begin_reading(std::int32_t block, bool wait);
  /// Waits for reads that were begun, and throws the first error.
  void end_reading(std::int32_t block);

  std::shared_ptr<HostArena> arena_;
  std::shared_ptr<HostArena> plain_;       // never pinned: of what only the host works on
  std::shared_ptr<FileOperations> files_;  // of tests
  SpillFile file_;
  std::mutex moving_;  // one change of a home at a time: held while it waits for the disk, never the other way round
  mutable std::mutex mutex_;
  std::map<std::int32_t, Block> blocks_;
  std::multimap<Bytes, std::int32_t> free_extents_;  // by their bytes
  std::deque<TicketPtr> gradient_writes_;
  std::shared_ptr<WorkingMemory> working_;
  Peek peek_;
  Bytes spared_bytes_ = 0;
  double wait_seconds_ = 0.0;
  DiskLane lane_;
};

}  // namespace hydra
