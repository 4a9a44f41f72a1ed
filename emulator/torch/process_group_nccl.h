// The stand-in for torch's ProcessGroupNCCL, on the communicators of emulator/nccl.
//
// An operation is a kernel on the communicator's own stream, which follows the caller's current stream; a synchronous
// one is on the current stream. A communicator is made when it is first used, and blocks the host until all ranks have
// come, or by eagerConnectSingleDevice. As in torch, an unbatched send or receive has a communicator of its two ranks,
// unless the group was connected eagerly. Thread-safe, but that a batch belongs to the thread that began it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "emulator/torch/nccl_kernels.h"
#include "emulator/torch/nccl_work.h"

namespace emulated_cuda {

class ProcessGroupNccl : public c10d::Backend {
 public:
  struct Options : c10d::Backend::Options {
    explicit Options(bool high_priority = false)
        : c10d::Backend::Options("nccl"), is_high_priority_stream(high_priority) {}

    bool is_high_priority_stream;
    c10::intrusive_ptr<ProcessGroupNccl> split_from;
    std::int64_t split_color = 0;
  };
  using Works = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  ProcessGroupNccl(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<Options> options);

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return 0; }

  void eagerConnectSingleDevice(at::Device device) override;
  void abort() override;
  void shutdown() override;
  void startCoalescing() override;
  Works endCoalescing() override;

  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Works allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  Works reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Works allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Works _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  Works reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                       const c10d::ReduceScatterOptions& options) override;
  Works _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  Works alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_sizes,
                      std::vector<std::int64_t>& input_sizes, const c10d::AllToAllOptions& options) override;
  Works alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Works send(Tensors& tensors, int target, int tag) override;
  Works recv(Tensors& tensors, int source, int tag) override;
  Works barrier(const c10d::BarrierOptions& options) override;

  /// Communicators that exist.
  int communicators() const;

 private:
  /// A communicator, its stream, and the place behind its last kernel.
  struct Lane {
    std::shared_ptr<nccl::Communicator> communicator;
    c10::Device device;
    c10::cuda::CUDAStream stream;
    std::mutex issuing;
    std::shared_ptr<c10::Event> last;
  };
  using Kernel = std::function<void(const KernelContext&)>;

  /// What a launch needs beside its kernel.
  struct Launch {
    c10d::OpType type = c10d::OpType::UNKNOWN;
    bool async = true;
    bool blocks_host = false;
    std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
    Tensors outputs{};
    Tensors used{};
  };
  struct Batch {
    std::shared_ptr<Lane> lane;
    std::vector<nccl::Outgoing> outgoing;
    std::vector<nccl::Incoming> incoming;
    std::vector<Kernel> collectives;
    Tensors used;
  };

  std::shared_ptr<Lane> lane_of(const at::Tensor& tensor) {
    return lane("group", tensor.device(), getRank(), getSize());
  }
  std::shared_ptr<Lane> lane(const std::string& key, c10::Device device, int rank, int size);
  nccl::Meeting meeting_of(const std::string& key) const;
  Works point_to_point(Tensors& tensors, int peer, bool sends);
  Works all_reduce(const Tensors& tensors, const c10d::ReduceOp& reduction, Launch launch);
  /// Runs the kernel, or adds it to the batch that is under way.
  Works collective(const std::shared_ptr<Lane>& lane, Kernel kernel, Launch launch);
  Works run(Lane& lane, const Kernel& kernel, Launch launch);
  void release_ended();

  const c10::intrusive_ptr<c10d::Store> store_;
  const c10::intrusive_ptr<Options> options_;
  std::mutex making_;         // of communicators, one at a time
  mutable std::mutex mutex_;  // guards all below
  std::map<std::string, std::shared_ptr<Lane>> lanes_;
  std::shared_ptr<nccl::Communicator> connecting_;
  std::list<c10::intrusive_ptr<NcclWork>> not_waited_for_;
  bool eager_ = false;
  bool aborted_ = false;
  std::unique_ptr<Batch> batch_;
};

}  // namespace emulated_cuda
