#include "emulator/torch/process_group_nccl.h"

#include <ATen/Functions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>

#include <thread>
#include <utility>

#include "emulator/torch/stream_work.h"

namespace emulated_cuda {

namespace {

constexpr std::chrono::milliseconds kLook{10};  // between two looks into the store, as torch's own
constexpr std::chrono::hours kNever{24 * 365};

void check_tensor(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_cuda() && tensor.layout() == c10::kStrided, "Tensors must be CUDA and dense");
  TORCH_CHECK_VALUE(tensor.is_contiguous(tensor.suggest_memory_format()), "Tensors must be contiguous");
  const c10::ScalarType type = tensor.is_complex() ? c10::toRealValueType(tensor.scalar_type()) : tensor.scalar_type();
  TORCH_CHECK_TYPE(nccl_knows(type), "Unconvertible NCCL type ", tensor.scalar_type());
}

void check_one(const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "Expecting one tensor only but got multiple");
  check_tensor(tensors.front());
}

/// Complex elements are two real ones.
Share share_of(const at::Tensor& tensor) {
  check_tensor(tensor);
  if (tensor.is_complex()) {
    return {tensor.data_ptr(), 2 * tensor.numel(), c10::toRealValueType(tensor.scalar_type())};
  }
  return {tensor.data_ptr(), tensor.numel(), tensor.scalar_type()};
}

Share part_of(const Share& whole, std::int64_t first, std::int64_t count) {
  char* data = static_cast<char*>(whole.data) + static_cast<std::size_t>(first) * c10::elementSize(whole.type);
  return {data, count, whole.type};
}

std::vector<Share> parts_of(const Share& whole, int parts) {
  std::vector<Share> all;
  const std::int64_t count = whole.count / parts;
  for (int index = 0; index < parts; ++index) {
    all.push_back(part_of(whole, index * count, count));
  }
  return all;
}

std::vector<Share> shares_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Share> all;
  for (const at::Tensor& tensor : tensors) {
    all.push_back(share_of(tensor));
  }
  return all;
}

/// Shares of a tensor's rows; equal ones without sizes.
std::vector<Share> rows_of(const at::Tensor& tensor, const std::vector<std::int64_t>& sizes, int ranks) {
  const Share whole = share_of(tensor);
  if (sizes.empty()) {
    TORCH_CHECK(tensor.size(0) % ranks == 0, "Tensor's dim 0 does not divide equally across group size");
    return parts_of(whole, ranks);
  }
  std::vector<Share> all;
  const std::int64_t row = tensor.size(0) == 0 ? 0 : whole.count / tensor.size(0);
  std::int64_t first = 0;
  for (const std::int64_t size : sizes) {
    all.push_back(part_of(whole, first * row, size * row));
    first += size;
  }
  return all;
}

Share nothing_like(const Share& share) { return {share.data, 0, share.type}; }

}  // namespace

ProcessGroupNccl::ProcessGroupNccl(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                   c10::intrusive_ptr<Options> options)
    : Backend(rank, size), store_(std::move(store)), options_(std::move(options)) {}

// ---- communicators --------------------------------------------------------------------------------------------------

void ProcessGroupNccl::setTimeout(std::chrono::milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  options_->timeout = timeout;
}

nccl::Meeting ProcessGroupNccl::meeting_of(const std::string& key) const {
  const std::string prefix = "emulated_nccl/" + key + "/";
  const nccl::Clock::time_point deadline =
      nccl::Clock::now() + std::min<nccl::Clock::duration>(options_->timeout, kNever);
  const auto tell = [this, prefix](const std::string& name, const std::string& value) {
    store_->set(prefix + name, std::vector<std::uint8_t>(value.begin(), value.end()));
  };
  const auto hear = [this, prefix, deadline](const std::string& name, const std::function<bool()>& given_up) {
    while (!store_->check({prefix + name})) {
      if (given_up()) {
        throw nccl::Aborted("aborted while the communicator was made");
      }
      if (nccl::Clock::now() > deadline) {
        C10_THROW_ERROR(DistStoreError, "rank " + name + " has not come to make a communicator of NCCL");
      }
      std::this_thread::sleep_for(kLook);
    }
    const std::vector<std::uint8_t> value = store_->get(prefix + name);
    return std::string(value.begin(), value.end());
  };
  return {.tell = tell, .hear = hear};
}

std::shared_ptr<ProcessGroupNccl::Lane> ProcessGroupNccl::lane(const std::string& key, c10::Device device, int rank,
                                                               int size) {
  const std::lock_guard making(making_);
  auto communicator = std::make_shared<nccl::Communicator>(rank, size);
  {
    const std::lock_guard lock(mutex_);
    if (aborted_) {
      C10_THROW_ERROR(DistBackendError, "the process group of NCCL was aborted");
    }
    if (const auto found = lanes_.find(key); found != lanes_.end()) {
      TORCH_CHECK(found->second->device == device, "a rank uses one device in a process group of the emulated NCCL");
      return found->second;
    }
    connecting_ = communicator;
  }
  try {
    communicator->connect(meeting_of(key));
  } catch (const nccl::Aborted& error) {
    C10_THROW_ERROR(DistBackendError, error.what());
  }
  const c10::cuda::CUDAGuard guard(device);
  const auto stream = c10::cuda::getStreamFromPool(options_->is_high_priority_stream, device.index());
  const std::lock_guard lock(mutex_);
  connecting_ = nullptr;
  return lanes_[key] = std::make_shared<Lane>(communicator, device, stream);
}

void ProcessGroupNccl::eagerConnectSingleDevice(at::Device device) {
  lane("group", device, getRank(), getSize());
  const std::lock_guard lock(mutex_);
  eager_ = true;
}

void ProcessGroupNccl::abort() {
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  if (connecting_) {
    connecting_->abort();
  }
  for (const auto& [key, lane] : lanes_) {
    lane->communicator->abort();
  }
}

void ProcessGroupNccl::shutdown() {
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  lanes_.clear();
}

int ProcessGroupNccl::communicators() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(lanes_.size());
}

// ---- launches -------------------------------------------------------------------------------------------------------

void ProcessGroupNccl::release_ended() {
  const std::lock_guard lock(mutex_);
  not_waited_for_.remove_if([](const c10::intrusive_ptr<NcclWork>& work) {
    if (work->kernel_ended()) {
      work->release_tensors();
    }
    return work->kernel_ended();
  });
}

ProcessGroupNccl::Works ProcessGroupNccl::run(Lane& lane, const Kernel& kernel, Launch launch) {
  release_ended();
  const c10::cuda::CUDAGuard guard(lane.device);
  const auto current = c10::cuda::getCurrentCUDAStream(lane.device.index());
  const auto stream = launch.async ? lane.stream : current;
  const auto progress = std::make_shared<NcclProgress>();
  const auto limit = launch.timeout == c10d::kUnsetTimeout ? options_->timeout : launch.timeout;
  const nccl::Clock::time_point deadline = nccl::Clock::now() + std::min<nccl::Clock::duration>(limit, kNever);
  auto end = std::make_shared<c10::Event>(c10::kCUDA);
  {
    const std::lock_guard issuing(lane.issuing);
    c10::Event ready(c10::kCUDA);
    ready.record(current);
    ready.block(stream);
    if (lane.last) {
      lane.last->block(stream);
    }
    const c10::cuda::CUDAStreamGuard on_stream(stream);
    enqueue(lane.device.index(), [communicator = lane.communicator, kernel, progress, deadline] {
      try {
        kernel({.communicator = *communicator, .deadline = deadline});
        progress->end("");
      } catch (const nccl::Aborted& error) {
        progress->end(error.what());  // the stream goes on, as after ncclCommAbort
      } catch (const std::exception& error) {
        progress->end(error.what());
        throw;
      }
    });
    end->record(stream);
    lane.last = end;
  }
  if (!launch.async && !launch.blocks_host) {
    return {};
  }
  auto work = c10::make_intrusive<NcclWork>(
      getRank(), launch.type,
      NcclWork::Parts{lane.device, lane.communicator, progress, end, std::move(launch.outputs), std::move(launch.used),
                      launch.blocks_host});
  const std::lock_guard lock(mutex_);
  not_waited_for_.push_back(work);
  return work;
}

ProcessGroupNccl::Works ProcessGroupNccl::collective(const std::shared_ptr<Lane>& lane, Kernel kernel, Launch launch) {
  if (!batch_) {
    return run(*lane, kernel, std::move(launch));
  }
  batch_->collectives.push_back(std::move(kernel));
  batch_->used.insert(batch_->used.end(), launch.used.begin(), launch.used.end());
  batch_->lane = lane;
  return {};
}

void ProcessGroupNccl::startCoalescing() { batch_ = std::make_unique<Batch>(); }

ProcessGroupNccl::Works ProcessGroupNccl::endCoalescing() {
  const std::shared_ptr<Batch> batch = std::move(batch_);
  if (!batch || !batch->lane) {
    return {};
  }
  const Kernel kernel = [outgoing = batch->outgoing, incoming = batch->incoming,
                         collectives = batch->collectives](const KernelContext& context) {
    if (!outgoing.empty() || !incoming.empty()) {
      context.communicator.exchange(outgoing, incoming, context.deadline);
    }
    for (const Kernel& each : collectives) {
      each(context);
    }
  };
  return run(*batch->lane, kernel, {.type = c10d::OpType::COALESCED, .used = batch->used});
}

// ---- point to point -------------------------------------------------------------------------------------------------

ProcessGroupNccl::Works ProcessGroupNccl::point_to_point(Tensors& tensors, int peer, bool sends) {
  check_one(tensors);
  TORCH_CHECK_VALUE(peer != getRank(), "the emulated NCCL sends nothing to the same rank");
  const at::Tensor& tensor = tensors.front();
  const bool pair = !batch_ && !eager_;
  const int low = std::min(peer, getRank());
  const int high = std::max(peer, getRank());
  const auto lane =
      pair ? this->lane(std::to_string(low) + ":" + std::to_string(high), tensor.device(), getRank() == low ? 0 : 1, 2)
           : this->lane("group", tensor.device(), getRank(), getSize());
  const int target = pair ? 1 - lane->communicator->rank() : peer;
  const Share share = share_of(tensor);
  nccl::Header header =
      header_of(sends ? nccl::Kind::kSend : nccl::Kind::kReceive, share, lane->communicator->next_sequence());
  header.root = peer;
  header.bytes = share.bytes();
  header.alone = !batch_;
  const nccl::Outgoing outgoing{.peer = target, .header = header, .data = share.data};
  const nccl::Incoming incoming{.peer = target, .expected = header, .data = share.data};
  if (batch_) {
    batch_->lane = lane;
    batch_->used.push_back(tensor);
    sends ? batch_->outgoing.push_back(outgoing) : batch_->incoming.push_back(incoming);
    return {};
  }
  const Kernel kernel = [=](const KernelContext& context) {
    sends ? context.communicator.exchange({outgoing}, {}, context.deadline)
          : context.communicator.exchange({}, {incoming}, context.deadline);
  };
  return run(*lane, kernel,
             {.type = sends ? c10d::OpType::SEND : c10d::OpType::RECV, .outputs = tensors, .used = tensors});
}

ProcessGroupNccl::Works ProcessGroupNccl::send(Tensors& tensors, int target, int /*tag*/) {
  return point_to_point(tensors, target, true);
}

ProcessGroupNccl::Works ProcessGroupNccl::recv(Tensors& tensors, int source, int /*tag*/) {
  return point_to_point(tensors, source, false);
}

// ---- collectives ----------------------------------------------------------------------------------------------------

ProcessGroupNccl::Works ProcessGroupNccl::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  check_one(tensors);
  const std::shared_ptr<Lane> lane = lane_of(tensors.front());
  const Share share = share_of(tensors.front());
  const int root = static_cast<int>(options.rootRank);
  nccl::Header header = header_of(nccl::Kind::kBroadcast, share, lane->communicator->next_sequence());
  header.root = root;
  const auto size = static_cast<std::size_t>(getSize());
  std::vector<Share> out(size, getRank() == root ? share : nothing_like(share));
  std::vector<Share> in(size, nothing_like(share));
  in[static_cast<std::size_t>(root)] = share;
  return collective(lane, [=](const KernelContext& context) { all_to_all(context, header, out, in); },
                    {.type = c10d::OpType::BROADCAST,
                     .async = options.asyncOp,
                     .timeout = options.timeout,
                     .outputs = tensors,
                     .used = tensors});
}

ProcessGroupNccl::Works ProcessGroupNccl::all_reduce(const Tensors& tensors, const c10d::ReduceOp& reduction,
                                                     Launch launch) {
  const std::shared_ptr<Lane> lane = lane_of(tensors.front());
  const auto size = static_cast<std::size_t>(getSize());
  std::vector<std::pair<nccl::Header, Share>> parts;
  for (const at::Tensor& tensor : tensors) {
    const Share share = share_of(tensor);
    check_reduction(reduction, share.type);
    parts.emplace_back(header_of(nccl::Kind::kAllReduce, share, lane->communicator->next_sequence()), share);
    set_reduction(parts.back().first, reduction);
  }
  const auto kind = static_cast<c10d::ReduceOp::RedOpType>(reduction.op_);
  launch.outputs = launch.used = tensors;
  return collective(
      lane,
      [=](const KernelContext& context) {
        for (const auto& [header, share] : parts) {
          reduce_to(context, header, kind, std::vector<Share>(size, share), share);
        }
      },
      std::move(launch));
}

ProcessGroupNccl::Works ProcessGroupNccl::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  check_one(tensors);
  return all_reduce(tensors, options.reduceOp,
                    {.type = c10d::OpType::ALLREDUCE, .async = options.asyncOp, .timeout = options.timeout});
}

ProcessGroupNccl::Works ProcessGroupNccl::allreduce_coalesced(Tensors& tensors,
                                                              const c10d::AllreduceCoalescedOptions& options) {
  TORCH_CHECK_VALUE(!tensors.empty(), "Tensor list must be nonempty");
  return all_reduce(tensors, options.reduceOp,
                    {.type = c10d::OpType::COALESCED, .async = options.asyncOp, .timeout = options.timeout});
}

ProcessGroupNccl::Works ProcessGroupNccl::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  check_one(tensors);
  const std::shared_ptr<Lane> lane = lane_of(tensors.front());
  const Share share = share_of(tensors.front());
  check_reduction(options.reduceOp, share.type);
  const int root = static_cast<int>(options.rootRank);
  nccl::Header header = header_of(nccl::Kind::kReduce, share, lane->communicator->next_sequence());
  header.root = root;
  set_reduction(header, options.reduceOp);
  std::vector<Share> out(static_cast<std::size_t>(getSize()), nothing_like(share));
  out[static_cast<std::size_t>(root)] = share;
  const Share into = getRank() == root ? share : nothing_like(share);
  const auto kind = static_cast<c10d::ReduceOp::RedOpType>(options.reduceOp.op_);
  return collective(lane, [=](const KernelContext& context) { reduce_to(context, header, kind, out, into); },
                    {.type = c10d::OpType::REDUCE,
                     .async = options.asyncOp,
                     .timeout = options.timeout,
                     .outputs = tensors,
                     .used = tensors});
}

ProcessGroupNccl::Works ProcessGroupNccl::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  check_one(inputs);
  Tensors& into = outputs.at(0);
  for (const at::Tensor& each : into) {
    TORCH_CHECK(each.numel() == inputs[0].numel(), "the emulated NCCL gathers tensors of one size only");
  }
  const std::shared_ptr<Lane> lane = lane_of(inputs[0]);
  const Share share = share_of(inputs[0]);
  const nccl::Header header = header_of(nccl::Kind::kAllGather, share, lane->communicator->next_sequence());
  const std::vector<Share> out(static_cast<std::size_t>(getSize()), share);
  Tensors used = into;
  used.push_back(inputs[0]);
  return collective(lane,
                    [=, in = shares_of(into)](const KernelContext& context) { all_to_all(context, header, out, in); },
                    {.type = c10d::OpType::ALLGATHER,
                     .async = options.asyncOp,
                     .timeout = options.timeout,
                     .outputs = into,
                     .used = used});
}

ProcessGroupNccl::Works ProcessGroupNccl::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                          const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(input.numel() * getSize() == output.numel(),
                    "output tensor size must be equal to world_size times input tensor size");
  TORCH_CHECK_TYPE(input.dtype() == output.dtype(), "output tensor must have the same type as input tensor");
  const std::shared_ptr<Lane> lane = lane_of(input);
  const Share share = share_of(input);
  const nccl::Header header = header_of(nccl::Kind::kAllGather, share, lane->communicator->next_sequence());
  const std::vector<Share> out(static_cast<std::size_t>(getSize()), share);
  return collective(lane,
                    [=, in = parts_of(share_of(output), getSize())](const KernelContext& context) {
                      all_to_all(context, header, out, in);
                    },
                    {.type = c10d::OpType::_ALLGATHER_BASE,
                     .async = options.asyncOp,
                     .timeout = options.timeout,
                     .outputs = {output},
                     .used = {input, output}});
}

ProcessGroupNccl::Works ProcessGroupNccl::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                         const c10d::ReduceScatterOptions& options) {
  check_one(outputs);
  const std::shared_ptr<Lane> lane = lane_of(outputs[0]);
  const Share into = share_of(outputs[0]);
  check_reduction(options.reduceOp, into.type);
  const std::vector<Share> out = shares_of(inputs.at(0));
  for (const Share& each : out) {
    TORCH_CHECK(each.count == into.count, "the emulated NCCL scatters tensors of one size only");
  }
  nccl::Header header = header_of(nccl::Kind::kReduceScatter, into, lane->communicator->next_sequence());
  set_reduction(header, options.reduceOp);
  const auto kind = static_cast<c10d::ReduceOp::RedOpType>(options.reduceOp.op_);
  Tensors used = inputs[0];
  used.push_back(outputs[0]);
  return collective(lane, [=](const KernelContext& context) { reduce_to(context, header, kind, out, into); },
                    {.type = c10d::OpType::REDUCE_SCATTER,
                     .async = options.asyncOp,
                     .timeout = options.timeout,
                     .outputs = outputs,
                     .used = used});
}

ProcessGroupNccl::Works ProcessGroupNccl::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                               const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_VALUE(output.numel() * getSize() == input.numel(),
                    "input tensor must be the same size as output size times world size");
  TORCH_CHECK_TYPE(input.dtype() == output.dtype(), "input tensor must be the same type as the output tensor.");
  const std::shared_ptr<Lane> lane = lane_of(output);
  const Share into = share_of(output);
  check_reduction(options.reduceOp, into.type);
  nccl::Header header = header_of(nccl::Kind::kReduceScatter, into, lane->communicator->next_sequence());
  set_reduction(header, options.reduceOp);
  const auto kind = static_cast<c10d::ReduceOp::RedOpType>(options.reduceOp.op_);
  return collective(lane,
                    [=, out = parts_of(share_of(input), getSize())](const KernelContext& context) {
                      reduce_to(context, header, kind, out, into);
                    },
                    {.type = c10d::OpType::_REDUCE_SCATTER_BASE,
                     .async = options.asyncOp,
                     .timeout = options.timeout,
                     .outputs = {output},
                     .used = {input, output}});
}

ProcessGroupNccl::Works ProcessGroupNccl::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                        std::vector<std::int64_t>& output_sizes,
                                                        std::vector<std::int64_t>& input_sizes,
                                                        const c10d::AllToAllOptions& options) {
  const std::shared_ptr<Lane> lane = lane_of(input);
  const std::vector<Share> out = rows_of(input, input_sizes, getSize());
  const std::vector<Share> in = rows_of(output, output_sizes, getSize());
  const nccl::Header header = header_of(nccl::Kind::kAllToAll, out[0], lane->communicator->next_sequence());
  return collective(lane, [=](const KernelContext& context) { all_to_all(context, header, out, in); },
                    {.type = c10d::OpType::ALLTOALL_BASE,
                     .async = options.asyncOp,
                     .timeout = options.timeout,
                     .outputs = {output},
                     .used = {input, output}});
}

ProcessGroupNccl::Works ProcessGroupNccl::alltoall(Tensors& outputs, Tensors& inputs,
                                                   const c10d::AllToAllOptions& options) {
  const std::shared_ptr<Lane> lane = lane_of(inputs.at(0));
  const std::vector<Share> out = shares_of(inputs);
  const std::vector<Share> in = shares_of(outputs);
  const nccl::Header header = header_of(nccl::Kind::kAllToAll, out[0], lane->communicator->next_sequence());
  Tensors used = inputs;
  used.insert(used.end(), outputs.begin(), outputs.end());
  return collective(lane, [=](const KernelContext& context) { all_to_all(context, header, out, in); },
                    {.type = c10d::OpType::ALLTOALL,
                     .async = options.asyncOp,
                     .timeout = options.timeout,
                     .outputs = outputs,
                     .used = used});
}

ProcessGroupNccl::Works ProcessGroupNccl::barrier(const c10d::BarrierOptions& options) {
  const c10::Device device =
      options.device.value_or(getBoundDeviceId().value_or(c10::Device(c10::kCUDA, c10::cuda::current_device())));
  const at::Tensor token = at::zeros({1}, at::dtype(at::kFloat).device(device));
  Works work = all_reduce({token}, c10d::ReduceOp::SUM,
                          {.type = c10d::OpType::BARRIER, .blocks_host = true, .timeout = options.timeout});
  if (options.asyncOp || !work) {
    return work;
  }
  work->wait();
  return {};
}

}  // namespace emulated_cuda
