// One operation of the stand-in for ProcessGroupNCCL: where its kernel is, and the tensors that it uses.
//
// wait() without a timeout lets the current stream follow, and does not block the host. With a timeout, and for a
// barrier, it blocks the host too. It holds the tensors until it is waited for. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "emulator/nccl/communicator.h"

namespace emulated_cuda {

/// What a kernel and the host know of an operation.
class NcclProgress {
 public:
  /// Called by the kernel at its end; an empty text means success.
  void end(const std::string& error);
  bool ended() const;
  std::string error() const;
  /// Waits for the end, at most this long.
  void wait_for(std::chrono::milliseconds time) const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool ended_ = false;
  std::string error_;
};

class NcclWork : public c10d::Work {
 public:
  struct Parts {
    c10::Device device{c10::kCUDA};
    std::shared_ptr<nccl::Communicator> communicator;
    std::shared_ptr<NcclProgress> progress;
    std::shared_ptr<c10::Event> end;  // behind the kernel
    std::vector<at::Tensor> outputs;
    std::vector<at::Tensor> used;  // by the kernel
    bool blocks_host = false;      // a barrier
  };

  NcclWork(int rank, c10d::OpType type, Parts parts);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;

  bool kernel_ended() const { return parts_.progress->ended(); }
  /// The kernel has ended: no stream uses the tensors any more.
  void release_tensors();

 private:
  std::string error() const;
  void block_host(std::chrono::milliseconds timeout);

  Parts parts_;
  std::mutex tensors_;  // guards the tensors
};

}  // namespace emulated_cuda
