// Optimizer state whose home is the disk: its bytes are on the host only while a step works on them.
//
// The tensors that the user knows have no bytes meanwhile; an operation on one of them brings the whole block's home to
// the host. A deferred update borrows a block's bytes: they are read into working memory, ahead of the update where
// there is room, and written back behind it. There are kWorkingSets such memories, each as large as the largest block
// needs, which is all that the host holds of what is at home here. Tensors below kLeastBytes stay on the host.
//
// Threads: any; one mutex, under which nobody waits. Calls that wait are made without the interpreter lock. An error of
// the disk is thrown as SpillError: of a read, by whoever needed the bytes, who may try again; of a write, by whoever
// needs them next, since they are lost.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "csrc/pytorch/arena_region.h"
#include "csrc/pytorch/tensor_plan.h"
#include "csrc/pytorch/withheld.h"
#include "csrc/transfer/disk_lane.h"

namespace hydra {

struct DiskStatistics {
  Bytes at_home_bytes = 0;  // of tensors whose home is the disk now
  Bytes working_bytes = 0;  // of host memory for what is borrowed
  Bytes read_bytes = 0;
  Bytes written_bytes = 0;
  double wait_seconds = 0.0;  // updates waited for bytes, or for memory
};

class DiskHomes {
 public:
  static constexpr Bytes kLeastBytes = 16 * kKiB;
  static constexpr int kWorkingSets = 3;  // one is read, one worked on, one written

  /// Throws SpillError if there can be no file in the folder. `files`: the system's if null.
  explicit DiskHomes(const std::string& folder, std::shared_ptr<FileOperations> files = nullptr);
  ~DiskHomes();

  /// Room for tensors of these bytes. Throws SpillError if the disk has not got it.
  void reserve(const std::vector<Bytes>& sizes);
  /// The disk becomes the home of those of these tensors for which that is worth while. Waits until they are written.
  /// If others are at home with this block, all of the block's comes to the host first. Whoever else knows a tensor's
  /// memory, such as an array of numpy's, keeps it, and sees it change no more.
  void settle(std::int32_t block, const std::vector<at::Tensor>& tensors, const std::weak_ptr<PagedModel>& owner);
  /// A tensor that lies as `like` does, of zeros, and has its home here from the beginning. Nothing is written.
  at::Tensor make_zeros(std::int32_t block, const at::Tensor& like, at::ScalarType dtype,
                        const std::weak_ptr<PagedModel>& owner);
  /// Everything of the block, or of all, is on the host again; nothing happens where it is.
  void bring_home(std::int32_t block);
  void bring_home();
  /// What is at home here is lost; its tensors say so from now on.
  void abandon() noexcept;

  bool holds(const at::Tensor& tensor) const;
  std::vector<std::int32_t> blocks() const;

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

  DiskStatistics statistics() const;

 private:
  struct Resting {
    WithheldTensor tensor;
    std::int32_t extent = -1;
    Bytes offset = 0;  // in the working memory of the block
    bool written = false;
  };
  struct Block {
    std::vector<Resting> resting;
    Bytes bytes = 0;                   // of working memory
    ArenaRegionPtr memory;             // while borrowed, or expected to be
    std::vector<TicketPtr> transfers;  // the last ones
  };

  /// Waits for all of them, and then throws the first error.
  static void wait_for(const std::vector<TicketPtr>& tickets);
  Resting* find_locked(std::int32_t block, const c10::Storage& storage);
  void add(std::int32_t block, WithheldTensor tensor, std::int32_t extent, bool written);
  std::int32_t take_extent(Bytes bytes);
  void free_extent(std::int32_t extent);
  void bring_home_alone(std::int32_t block);
  bool holds_others(std::int32_t block, const std::vector<at::Tensor>& tensors) const;
  ArenaRegionPtr take_idle_locked(Bytes bytes);
  /// Comes back to the others when its last owner lets go. Null if there is none and `wait` is false.
  ArenaRegionPtr take_memory(Bytes bytes, bool wait = true);
  void drop_memory(std::int32_t block);
  void begin_reading(std::int32_t block, bool wait);
  /// Waits for what was begun last, and throws its first error.
  void end_transfers(std::int32_t block);

  std::shared_ptr<HostArena> arena_;       // never pinned: only the host works there
  std::shared_ptr<FileOperations> files_;  // of tests
  SpillFile file_;
  std::mutex moving_;  // of whoever changes a home: held while it waits for the disk, never the other way round
  mutable std::mutex mutex_;
  std::condition_variable returned_;
  std::map<std::int32_t, Block> blocks_;
  std::multimap<Bytes, std::int32_t> free_extents_;  // by their bytes
  std::vector<ArenaRegionPtr> idle_;
  int working_sets_ = 0;  // idle ones and lent ones
  Bytes working_bytes_ = 0;
  double wait_seconds_ = 0.0;
  DiskLane lane_;
};

}  // namespace hydra
