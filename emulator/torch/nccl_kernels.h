// The kernels of the stand-in for NCCL, which run on a stream's thread: they exchange bytes with the other ranks, and
// add up in the order of the ranks. Not for the host: they read device memory.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "emulator/nccl/communicator.h"

namespace emulated_cuda {

/// One rank's part of an operation, in device memory.
struct Share {
  void* data = nullptr;
  std::int64_t count = 0;
  c10::ScalarType type = c10::ScalarType::Byte;

  std::size_t bytes() const noexcept { return static_cast<std::size_t>(count) * c10::elementSize(type); }
};

/// Whether NCCL has this type of elements.
bool nccl_knows(c10::ScalarType type) noexcept;
/// Throws torch's error if NCCL does not have this reduction for these elements.
void check_reduction(const c10d::ReduceOp& reduction, c10::ScalarType type);

/// A header of an operation on elements like these.
nccl::Header header_of(nccl::Kind kind, const Share& share, std::uint64_t sequence);
void set_reduction(nccl::Header& header, const c10d::ReduceOp& reduction);

/// What a kernel is given. The communicator outlives it.
struct KernelContext {
  nccl::Communicator& communicator;
  nccl::Clock::time_point deadline;
};

/// Sends `out[rank]` to each rank, and receives into `in[rank]`.
void all_to_all(const KernelContext& context, const nccl::Header& header, const std::vector<Share>& out,
                const std::vector<Share>& in);
/// The sum, or other reduction, of what all ranks have for this one: `out[rank]` goes to each rank.
void reduce_to(const KernelContext& context, const nccl::Header& header, c10d::ReduceOp::RedOpType reduction,
               const std::vector<Share>& out, const Share& into);

}  // namespace emulated_cuda
