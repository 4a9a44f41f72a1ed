#include "emulator/nccl/header.h"

#include <cstddef>
#include <cstring>

namespace emulated_cuda::nccl {

namespace {

const char* name_of(Kind kind) noexcept {
  switch (kind) {
    case Kind::kBroadcast:
      return "broadcast";
    case Kind::kAllReduce:
      return "all_reduce";
    case Kind::kReduce:
      return "reduce";
    case Kind::kReduceScatter:
      return "reduce_scatter";
    case Kind::kAllGather:
      return "all_gather";
    case Kind::kAllToAll:
      return "all_to_all";
    case Kind::kBarrier:
      return "barrier";
    case Kind::kSend:
      return "send";
    case Kind::kReceive:
      return "recv";
  }
  return "unknown";
}

template <std::size_t size>
std::string text_of(const std::array<char, size>& characters) {
  return {characters.data(), ::strnlen(characters.data(), size)};
}

}  // namespace

std::string describe(const Header& header) {
  std::string text = name_of(header.kind);
  if (header.reduction[0] != '\0') {
    text.append("(").append(text_of(header.reduction)).append(")");
  }
  text.append(" of ").append(std::to_string(header.count)).append(" ").append(text_of(header.type));
  if (header.root >= 0) {
    const char* role = header.kind == Kind::kSend      ? " to rank "
                       : header.kind == Kind::kReceive ? " from rank "
                                                       : ", root ";
    text += role + std::to_string(header.root);
  }
  return text.append(" (operation ").append(std::to_string(header.sequence)).append(")");
}

bool fits(const Header& expected, const Header& found) noexcept {
  const bool same_kind = expected.kind == Kind::kReceive ? found.kind == Kind::kSend : expected.kind == found.kind;
  if (!same_kind || expected.count != found.count || expected.type != found.type) {
    return false;
  }
  return !expected.collective() || (expected.root == found.root && expected.reduction == found.reduction);
}

}  // namespace emulated_cuda::nccl
