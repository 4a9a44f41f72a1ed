#include "emulator/torch/nccl_kernels.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace emulated_cuda {

namespace {

using c10d::ReduceOp;

constexpr std::array kTypes{c10::ScalarType::Char,        c10::ScalarType::Byte,         c10::ScalarType::Float,
                            c10::ScalarType::Double,      c10::ScalarType::Int,          c10::ScalarType::Long,
                            c10::ScalarType::Half,        c10::ScalarType::Bool,         c10::ScalarType::BFloat16,
                            c10::ScalarType::Float8_e5m2, c10::ScalarType::Float8_e4m3fn};

const char* name_of(ReduceOp::RedOpType reduction) {
  switch (reduction) {
    case ReduceOp::SUM:
      return "SUM";
    case ReduceOp::AVG:
      return "AVG";
    case ReduceOp::PRODUCT:
      return "PRODUCT";
    case ReduceOp::MIN:
      return "MIN";
    case ReduceOp::MAX:
      return "MAX";
    default:
      return "another reduction";
  }
}

template <std::size_t size>
void write_text(std::array<char, size>& into, const std::string& text) {
  into.fill('\0');
  std::memcpy(into.data(), text.data(), std::min(text.size(), size - 1));
}

at::Tensor over(const Share& share) { return at::from_blob(share.data, {share.count}, at::dtype(share.type)); }

void add_to(at::Tensor& total, const at::Tensor& share, ReduceOp::RedOpType reduction) {
  switch (reduction) {
    case ReduceOp::PRODUCT:
      total.mul_(share);
      return;
    case ReduceOp::MIN:
      at::minimum_out(total, total, share);
      return;
    case ReduceOp::MAX:
      at::maximum_out(total, total, share);
      return;
    default:
      total.add_(share);
  }
}

}  // namespace

bool nccl_knows(c10::ScalarType type) noexcept { return std::ranges::find(kTypes, type) != kTypes.end(); }

void check_reduction(const ReduceOp& reduction, c10::ScalarType type) {
  const bool known = reduction.op_ == ReduceOp::SUM || reduction.op_ == ReduceOp::AVG ||
                     reduction.op_ == ReduceOp::PRODUCT || reduction.op_ == ReduceOp::MIN ||
                     reduction.op_ == ReduceOp::MAX;
  TORCH_CHECK_VALUE(known, "Cannot use this ReduceOp with NCCL");
  TORCH_CHECK_TYPE(type != c10::ScalarType::Bool || reduction.op_ != ReduceOp::AVG,
                   "Cannot use ReduceOp.AVG with Boolean inputs");
}

nccl::Header header_of(nccl::Kind kind, const Share& share, std::uint64_t sequence) {
  nccl::Header header;
  header.kind = kind;
  header.sequence = sequence;
  header.count = static_cast<std::uint64_t>(share.count);
  write_text(header.type, c10::toString(share.type));
  return header;
}

void set_reduction(nccl::Header& header, const ReduceOp& reduction) {
  write_text(header.reduction, name_of(reduction.op_));
}

void all_to_all(const KernelContext& context, const nccl::Header& header, const std::vector<Share>& out,
                const std::vector<Share>& in) {
  std::vector<nccl::Outgoing> outgoing;
  std::vector<nccl::Incoming> incoming;
  const auto told = [&header](const Share& share) {
    nccl::Header own = header;
    own.bytes = share.bytes();
    if (header.kind == nccl::Kind::kAllToAll) {
      own.count = static_cast<std::uint64_t>(share.count);
    }
    return own;
  };
  for (int peer = 0; peer < context.communicator.size(); ++peer) {
    const Share& sent = out[static_cast<std::size_t>(peer)];
    const Share& received = in[static_cast<std::size_t>(peer)];
    if (peer != context.communicator.rank()) {
      outgoing.push_back({.peer = peer, .header = told(sent), .data = sent.data});
      incoming.push_back({.peer = peer, .expected = told(received), .data = received.data});
    } else if (sent.data != received.data && received.bytes() > 0) {
      std::memmove(received.data, sent.data, received.bytes());
    }
  }
  context.communicator.exchange(outgoing, incoming, context.deadline);
}

void reduce_to(const KernelContext& context, const nccl::Header& header, ReduceOp::RedOpType reduction,
               const std::vector<Share>& out, const Share& into) {
  const bool as_maximum = into.type == c10::ScalarType::Bool && reduction == ReduceOp::SUM;
  const ReduceOp::RedOpType used = as_maximum ? ReduceOp::MAX : reduction;
  std::vector<at::Tensor> parts;
  std::vector<Share> in;
  for (int peer = 0; peer < context.communicator.size(); ++peer) {
    parts.push_back(at::empty({into.count}, at::dtype(into.type)));
    in.push_back({.data = parts.back().data_ptr(), .count = into.count, .type = into.type});
  }
  all_to_all(context, header, out, in);
  if (into.count == 0) {
    return;
  }
  at::Tensor total = parts.front();
  for (std::size_t peer = 1; peer < parts.size(); ++peer) {
    add_to(total, parts[peer], used);
  }
  if (reduction == ReduceOp::AVG) {
    const std::int64_t ranks = context.communicator.size();
    at::isFloatingType(into.type) ? total.div_(ranks) : total.div_(ranks, "trunc");
  }
  over(into).copy_(total);
}

}  // namespace emulated_cuda
