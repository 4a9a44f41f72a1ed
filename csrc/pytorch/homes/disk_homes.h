// Weights, gradients and optimizer state whose home is the disk. Their bytes are on the host only while an update or a
// fill uses them.
//
// An extent has one tensor of a state, one gradient, or all weights of a block in the layout of the block's slot.
// Meanwhile the user's tensors have no bytes. An operation on one of them brings its extent to the host.
// A deferred update borrows a block's extents: they are read into working memory, ahead of the update if there is
// room, and all but gradients are written back behind it. There are kWorkingSets such memories, each as large as the
// largest block needs. Fills read weights into memory of their own (WeightLoans), unless the working memory of an
// update still has them. Tensors of state, and gradients, below kLeastDiskBytes stay on the host.
//
// Owns the spill file, its lane, and the memory of borrowed extents. Sizes are bytes, times are seconds.
// Threads: any; two mutexes, moving_ before mutex_. moving_ serialises changes of homes, and may be held while waiting
// for the disk. mutex_ guards the index, and is never held while waiting. Calls that wait are made without the
// interpreter lock. Errors of the disk are SpillErrors. A read's error goes to the caller that needs the bytes, which
// may try again. A write's error goes to the next caller that needs the bytes, which are lost.
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
  std::array<Bytes, kDiskRoles> at_home_bytes{};  // bytes of extents that are a home now, by role
  Bytes working_bytes = 0;                        // bytes of working memory
  Bytes read_bytes = 0;
  Bytes written_bytes = 0;
  Bytes spared_bytes = 0;     // bytes that fills did not read, because an update still had them in memory
  double wait_seconds = 0.0;  // seconds that updates waited for bytes or memory
};

class DiskHomes {
 public:
  static constexpr int kWorkingSets = 3;  // one is read, one is updated, one is written

  /// Throws SpillError if the folder cannot have the file. Weights and gradients return to memory of `arena`, state to
  /// memory that is never pinned. `files` may be null: then the system's files are used.
  DiskHomes(const std::string& folder, std::shared_ptr<HostArena> arena,
            std::shared_ptr<FileOperations> files = nullptr);
  ~DiskHomes();

  /// Reserves room for extents of these sizes. Throws SpillError if the disk has no room.
  void reserve(const std::vector<Bytes>& sizes);
  /// Makes the disk the home of those tensors of a state that are large enough. Waits until they are written. If the
  /// block has other state at home here, brings all of the block's state to the host first. Other owners of a tensor's
  /// memory, such as a numpy array, keep the memory, and see no later changes.
  void settle(std::int32_t block, const std::vector<at::Tensor>& tensors, const std::weak_ptr<PagedModel>& owner);
  /// Makes the disk the home of a block's weights. Waits until they are written. Returns false, and changes nothing, if
  /// their memory has another owner.
  bool settle_weights(std::int32_t block, BlockBacking& backing, const std::weak_ptr<PagedModel>& owner);
  /// Makes the disk the home of gradients, whose memory is as transfers need it (SpillFile). Begins to write them.
  /// Waits for earlier writes while more than `backlog` bytes are under way.
  void store_gradients(std::int32_t block, const std::vector<at::Tensor>& gradients,
                       const std::weak_ptr<PagedModel>& owner, Bytes backlog);
  /// Blocks until gradients are written. Throws the first error.
  void expect_gradients();
  /// Makes a tensor with the sizes and strides of `like`, whose home is the disk from the beginning. It is all zeros,
  /// or, if `copies`, the value that `like` has when the tensor is first read, in its own type. Writes nothing.
  at::Tensor make(std::int32_t block, const at::Tensor& like, at::ScalarType dtype, bool copies,
                  const std::weak_ptr<PagedModel>& owner);

  /// Brings the storage's extent to the host. Does nothing if its home is not the disk; the same holds for the others.
  void bring_home(std::int32_t block, const c10::Storage& storage);
  /// Brings the block's weights to the host.
  void bring_weights_home(std::int32_t block);
  /// Brings all extents of the block to the host.
  void bring_home(std::int32_t block);
  /// Brings all extents of all blocks to the host.
  void bring_home();
  /// Drops all bytes at home here. Operations on their tensors raise from now on.
  void abandon() noexcept;
  /// Returns a copy of a tensor whose home is the disk, or an undefined tensor if it is not. The tensor's home stays.
  at::Tensor read(std::int32_t block, const at::Tensor& tensor);

  bool holds(const at::Tensor& tensor) const;
  /// Whether the home of the block's weights is the disk.
  bool holds_weights(std::int32_t block) const;

  /// Begins to read a block's weights into memory of their size in a slot. Returns null if their home is not the disk.
  TicketPtr read_weights(std::int32_t block, const ArenaRegionPtr& memory);
  /// Returns the weights that an update has left in working memory, while they are being written, or null. As long as
  /// the pointer lives, updates cannot use that memory.
  std::shared_ptr<const std::byte> updated_weights(std::int32_t block);

  /// The places of a step's tensors: addresses on the host, or offsets in working memory.
  struct Places {
    std::unordered_map<const c10::TensorImpl*, void*> on_host;
    std::unordered_map<const c10::TensorImpl*, Bytes> in_memory;
  };
  /// Returns the present places of a plan's tensors. The user may give tensors other memory before the step runs.
  Places places(std::int32_t block, const TensorPlan& plan);
  /// Announces borrow(): reads the block's bytes now if there is memory.
  void expect(std::int32_t block);
  /// Returns the plan with addresses in working memory, which has the bytes until give_back().
  StepPlan borrow(std::int32_t block, const TensorPlan& plan, const Places& places);
  /// Returns the working memory after the update, and begins to write its weights and state.
  void give_back(std::int32_t block);
  DiskLane& lane() noexcept { return lane_; }

  DiskStatistics statistics() const;

 private:
  struct Member {
    WithheldTensor tensor;
    Bytes offset = 0;                                                                          // in the extent
    c10::weak_intrusive_ptr<c10::TensorImpl> gradient{c10::intrusive_ptr<c10::TensorImpl>()};  // gradients only
  };
  /// The contents of an extent.
  struct Resting {
    DiskRole role = DiskRole::kState;
    std::int32_t extent = -1;
    std::vector<Member> members{};
    Bytes offset = -1;  // in the working memory of the block; negative if the update under way does not work on it
    bool written = false;
    at::Tensor copy_of{};             // the initial value, until the extent is written; zeros if undefined
    BlockBacking* backing = nullptr;  // weights only
  };
  struct Block {
    std::vector<Resting> resting;
    Bytes bytes = 0;                   // the size of its working memory
    ArenaRegionPtr memory;             // its working memory, from expect() or borrow() until give_back()
    std::vector<TicketPtr> transfers;  // reads into its working memory
    std::weak_ptr<ArenaRegion> being_written;
  };

  /// Weights that were read for one tensor, kept because the next tensor probably needs them too.
  struct Peek {
    std::int32_t extent = -1;
    ArenaRegionPtr region;
  };

  /// Waits for all tickets, and then throws the first error.
  static void wait_for(const std::vector<TicketPtr>& tickets);
  struct Found {
    std::size_t resting = 0;  // the extent's index in the block
    Bytes offset = 0;         // the storage's offset in the extent
  };
  std::optional<Found> find_locked(std::int32_t block, const c10::Storage& storage) const;
  void add(std::int32_t block, Resting resting);
  std::int32_t take_extent(Bytes bytes);
  void free_extent(std::int32_t extent);
  /// Whether this is a gradient that the user has dropped.
  static bool is_forgotten(const Resting& resting);
  void drop_unused(std::int32_t block);
  bool holds_other_state(std::int32_t block, const std::vector<at::Tensor>& tensors) const;
  /// Brings the extents that `chosen` accepts to the host. The caller holds moving_.
  void bring_home_alone(std::int32_t block, const std::function<bool(const Resting&)>& chosen);
  static void give_home(const Resting& resting, const ArenaRegionPtr& region);
  /// Writes the initial value: the values at `from`, in the tensor's own type.
  static void begin_as(const Resting& resting, void* to, const void* from);
  at::Tensor read_alone(std::int32_t block, const at::Tensor& tensor);
  /// Reads an extent into `memory`, or its initial value if it was never written; then the ticket is null.
  TicketPtr read_extent(std::int32_t block, const Resting& resting, const ArenaRegionPtr& memory);
  static std::vector<Resting> worked_on_locked(const Block& contents);
  void drop_memory(std::int32_t block);
  void begin_reading(std::int32_t block, bool wait);
  /// Waits for the reads that have begun, and throws the first error.
  void end_reading(std::int32_t block);

  std::shared_ptr<HostArena> arena_;
  std::shared_ptr<HostArena> plain_;       // never pinned, for memory that only the host uses
  std::shared_ptr<FileOperations> files_;  // for tests; may be null
  SpillFile file_;
  std::mutex moving_;  // serialises changes of homes; may be held while waiting for the disk, and is taken first
  mutable std::mutex mutex_;
  std::map<std::int32_t, Block> blocks_;
  std::multimap<Bytes, std::int32_t> free_extents_;  // by size
  std::deque<TicketPtr> gradient_writes_;
  std::shared_ptr<WorkingMemory> working_;
  Peek peek_;
  Bytes spared_bytes_ = 0;
  double wait_seconds_ = 0.0;
  DiskLane lane_;
};

}  // namespace hydra
