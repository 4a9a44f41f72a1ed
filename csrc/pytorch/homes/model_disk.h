// The disk of one model, if it has one: the homes on it, host memory for its transfers, and its statistics.
//
// open() makes the homes, once. close() returns their room, threads and memory; the statistics stay. A forked child has
// none of the threads: there uses throw StateError, and close() frees nothing.
// Threads: any; nothing else runs during open() and close().
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
#include "csrc/transfer/device_backend.h"

namespace hydra {

class ModelDisk {
 public:
  ModelDisk(DeviceBackend& backend, std::shared_ptr<HostArena> arena, ModelBlocks& blocks, const WindowGate& gate);

  /// Makes homes in this folder, and reserves room for extents of these sizes; see DiskHomes. `files`: null for the
  /// system's.
  void open(const std::string& folder, const std::vector<Bytes>& sizes, std::shared_ptr<FileOperations> files);
  void close() noexcept;

  /// Null if the model has no disk.
  DiskHomes* homes() const noexcept { return homes_.get(); }
  bool holds(const at::Tensor& tensor) const { return homes_ && homes_->holds(tensor); }
  /// Throws StateError with this message if the model has no disk, or its context has ended.
  DiskHomes& expect_open(const char* message) const;
  /// Throws StateError in a forked child if the model has a disk, because no thread there could read it.
  void expect_here() const;

  const std::shared_ptr<WeightLoans>& loans() const noexcept { return loans_; }
  const std::shared_ptr<HostBuffers>& gradient_buffers() const noexcept { return gradient_buffers_; }
  /// Makes a tensor of the optimizer's state; see DiskHomes::make().
  at::Tensor make(std::int32_t block, const at::Tensor& like, at::ScalarType dtype, bool copies);
  /// The most fills that may have weights in host memory at once: those of one lane, in two classes of priority, and
  /// those that are read ahead.
  std::size_t fills() const { return 2 * backend_.to_device().in_flight() + WeightLoans::kAhead; }
  DiskStatistics statistics() const;

 private:
  DeviceBackend& backend_;
  std::shared_ptr<HostArena> arena_;
  ModelBlocks& blocks_;
  const WindowGate& gate_;
  const HomeProcess process_;
  std::unique_ptr<DiskHomes> homes_;
  DiskStatistics used_;  // the statistics after close(), and in a forked child
  std::shared_ptr<WeightLoans> loans_;
  std::shared_ptr<HostBuffers> gradient_buffers_;
};

}  // namespace hydra
