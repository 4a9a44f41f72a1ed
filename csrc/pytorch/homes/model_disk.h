// The disk of one model, if it has one: the homes there, host memory for what is read and written, and what was used.
//
// open() makes it, once; close() returns its room, threads and memory, and what was counted stays known. In a forked
// child, which has none of the threads, both the end and every use are refused or left out.
// Threads: open() and close() alone; the rest from any.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "csrc/base/process.h"
#include "csrc/pytorch/homes/disk_homes.h"
#include "csrc/pytorch/homes/weight_loans.h"
#include "csrc/pytorch/memory/host_buffers.h"
#include "csrc/pytorch/parameters/model_blocks.h"
#include "csrc/pytorch/parameters/window_gate.h"

namespace hydra {

class ModelDisk {
 public:
  ModelDisk(DeviceBackend& backend, std::shared_ptr<HostArena> arena, ModelBlocks& blocks, const WindowGate& gate);

  /// Tensors may have their home in this folder, where there is room for extents of these bytes; see DiskHomes.
  /// `files`: the system's if null.
  void open(const std::string& folder, const std::vector<Bytes>& sizes, std::shared_ptr<FileOperations> files);
  void close() noexcept;

  /// Null where there is none.
  DiskHomes* homes() const noexcept { return homes_.get(); }
  bool holds(const at::Tensor& tensor) const { return homes_ && homes_->holds(tensor); }
  /// Throws StateError with this message if there is none, or the context has ended.
  DiskHomes& expect_open(const char* message) const;
  /// Throws StateError in a forked child, if there is a disk: no thread is there to read it.
  void expect_here() const;

  const std::shared_ptr<WeightLoans>& loans() const noexcept { return loans_; }
  const std::shared_ptr<HostBuffers>& gradient_buffers() const noexcept { return gradient_buffers_; }
  /// A tensor of the optimizer's state; see DiskHomes::make().
  at::Tensor make(std::int32_t block, const at::Tensor& like, at::ScalarType dtype, bool copies);
  /// Weights that may be on their way from the disk at once, and so take host memory: of one lane, in two classes of
  /// priority, and what is read ahead.
  std::size_t fills() const { return 2 * backend_.to_device().in_flight() + WeightLoans::kAhead; }
  DiskStatistics statistics() const;

 private:
  DeviceBackend& backend_;
  std::shared_ptr<HostArena> arena_;
  ModelBlocks& blocks_;
  const WindowGate& gate_;
  const HomeProcess process_;
  std::unique_ptr<DiskHomes> homes_;
  DiskStatistics used_;  // once it is closed, and in a forked child
  std::shared_ptr<WeightLoans> loans_;
  std::shared_ptr<HostBuffers> gradient_buffers_;
};

}  // namespace hydra
