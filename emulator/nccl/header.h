// What a rank says of an operation to each rank that takes part in it, in front of the data. Both sides compare it.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace emulated_cuda::nccl {

enum class Kind : std::uint8_t {
  kBroadcast,
  kAllReduce,
  kReduce,
  kReduceScatter,
  kAllGather,
  kAllToAll,
  kBarrier,
  kSend,
  kReceive
};

/// Is sent as it is, between processes of one machine.
struct Header {
  std::uint64_t sequence = 0;  // the number of the operation in its communicator, for messages
  std::uint64_t count = 0;     // elements of one rank's share
  std::uint64_t bytes = 0;     // of the data that follow
  std::int32_t root = -1;      // the root of a collective; the other rank of a point-to-point operation
  Kind kind = Kind::kBarrier;
  bool alone = false;                // a send without anything beside it: its rank receives nothing before it has ended
  std::array<char, 18> type{};       // of the elements
  std::array<char, 16> reduction{};  // empty without one

  bool collective() const noexcept { return kind != Kind::kSend && kind != Kind::kReceive; }
};

/// "all_reduce(SUM) of 12 Float (operation 3)".
std::string describe(const Header& header);
/// Whether a rank that expects the one may get the other.
bool fits(const Header& expected, const Header& found) noexcept;

}  // namespace emulated_cuda::nccl
