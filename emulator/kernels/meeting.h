// Where threads of a block meet: at the block's barrier, and in the operations of a warp.
//
// Bookkeeping only: who has arrived, who goes on, what a lane gets. An executor makes threads wait, and locks. Threads
// that meet must do the same operation at the same place of the source, and all must come: stricter than a GPU, where
// threads that have ended count as arrived. A meeting throws KernelError, after which it is not used again.
#pragma once

#include <array>
#include <cstdint>
#include <source_location>
#include <stdexcept>
#include <string>

namespace emulated_cuda::kernels {

/// What a kernel did wrong.
class KernelError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline constexpr unsigned kWarpLanes = 32;
/// Bit i stands for lane i.
using LaneMask = std::uint32_t;

/// What a lane gives to an operation of its warp.
struct Offer {
  std::uint64_t value = 0;
  unsigned argument = 0;
};
using Offers = std::array<Offer, kWarpLanes>;
using Results = std::array<std::uint64_t, kWarpLanes>;

/// Something that threads do together.
struct Operation {
  const char* name;
  std::source_location where;
  // Of a warp only:
  LaneMask mask = 0;
  void (*combine)(const Offers& offers, LaneMask mask, Results& results) = nullptr;
  /// Whether lanes see afterwards what others have written before. On a GPU a vote or a shuffle does not give that.
  bool orders_memory = false;
};

class WarpMeeting {
 public:
  /// `lanes` is how many the warp has: fewer than 32 in the last one of some blocks.
  explicit WarpMeeting(unsigned lanes) noexcept;

  /// Returns the lanes that go on, if this was the last of the mask; else 0.
  LaneMask arrive(unsigned lane, const Operation& operation, const Offer& offer);
  bool waits(unsigned lane) const noexcept { return (waiting_ >> lane & 1U) != 0; }
  /// What the latest operation gave to a lane.
  std::uint64_t result(unsigned lane) const noexcept { return results_[lane]; }
  /// The lane's thread has ended.
  void end(unsigned lane);
  /// Which lanes wait, and where; empty if none does.
  std::string description() const;

 private:
  void expect_equal(LaneMask lanes) const;

  LaneMask present_;
  LaneMask waiting_ = 0;
  std::array<Operation, kWarpLanes> operations_{};
  Offers offers_{};
  Results results_{};
};

class BlockMeeting {
 public:
  explicit BlockMeeting(unsigned threads) noexcept : threads_(threads) {}

  /// Returns whether all threads have arrived now, and go on.
  bool arrive(const Operation& barrier);
  /// A thread has ended.
  void end();
  std::string description() const;

 private:
  void expect_all_present() const;

  const unsigned threads_;
  unsigned arrived_ = 0;
  unsigned ended_ = 0;
  Operation barrier_{};
};

}  // namespace emulated_cuda::kernels
