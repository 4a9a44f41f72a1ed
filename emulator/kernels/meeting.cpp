#include "emulator/kernels/meeting.h"

#include <bit>
#include <cstring>
#include <sstream>

namespace emulated_cuda::kernels {

namespace {

LaneMask bit(unsigned lane) noexcept { return LaneMask{1} << lane; }

bool same_place(const std::source_location& one, const std::source_location& other) noexcept {
  return one.line() == other.line() && one.column() == other.column() &&
         (one.file_name() == other.file_name() || std::strcmp(one.file_name(), other.file_name()) == 0);
}

bool same(const Operation& one, const Operation& other) noexcept {
  return one.mask == other.mask && one.combine == other.combine && same_place(one.where, other.where);
}

std::string hexadecimal(LaneMask mask) {
  std::ostringstream text;
  text << "0x" << std::hex << mask;
  return text.str();
}

std::string place(const Operation& operation) {
  return std::string(operation.where.file_name()) + ":" + std::to_string(operation.where.line());
}

std::string shown(const Operation& operation) {
  const std::string mask = operation.mask == 0 ? "" : hexadecimal(operation.mask);
  return std::string(operation.name) + "(" + mask + ") at " + place(operation);
}

}  // namespace

// ---- a warp ---------------------------------------------------------------------------------------------------------

WarpMeeting::WarpMeeting(unsigned lanes) noexcept : present_(lanes == kWarpLanes ? ~LaneMask{0} : bit(lanes) - 1) {}

LaneMask WarpMeeting::arrive(unsigned lane, const Operation& operation, const Offer& offer) {
  if ((operation.mask & bit(lane)) == 0) {
    throw KernelError("lane " + std::to_string(lane) + " is not in its own mask: " + shown(operation));
  }
  if (const LaneMask absent = operation.mask & ~present_; absent != 0) {
    throw KernelError("lanes " + hexadecimal(absent) + " of the mask have ended, or never were: " + shown(operation));
  }
  operations_[lane] = operation;
  offers_[lane] = offer;
  waiting_ |= bit(lane);
  if ((operation.mask & ~waiting_) != 0) {
    return 0;
  }
  expect_equal(operation.mask);
  if (operation.combine != nullptr) {
    operation.combine(offers_, operation.mask, results_);
  }
  waiting_ &= ~operation.mask;
  return operation.mask;
}

void WarpMeeting::end(unsigned lane) {
  present_ &= ~bit(lane);
  for (unsigned other = 0; other < kWarpLanes; ++other) {
    if (waits(other) && (operations_[other].mask & bit(lane)) != 0) {
      throw KernelError("lane " + std::to_string(lane) + " has ended, and lane " + std::to_string(other) +
                        " waits for it: " + shown(operations_[other]));
    }
  }
}

std::string WarpMeeting::description() const {
  if (waiting_ == 0) {
    return {};
  }
  const auto first = static_cast<unsigned>(std::countr_zero(waiting_));
  return "lanes " + hexadecimal(waiting_) + " wait, lane " + std::to_string(first) + " in " + shown(operations_[first]);
}

void WarpMeeting::expect_equal(LaneMask lanes) const {
  const auto first = static_cast<unsigned>(std::countr_zero(lanes));
  for (unsigned lane = first + 1; lane < kWarpLanes; ++lane) {
    if ((lanes & bit(lane)) != 0 && !same(operations_[first], operations_[lane])) {
      throw KernelError("lanes of one warp do not do the same: lane " + std::to_string(first) + " does " +
                        shown(operations_[first]) + ", lane " + std::to_string(lane) + " does " +
                        shown(operations_[lane]));
    }
  }
}

// ---- a block --------------------------------------------------------------------------------------------------------

bool BlockMeeting::arrive(const Operation& barrier) {
  if (arrived_ > 0 && !same(barrier_, barrier)) {
    throw KernelError("threads of one block wait at different barriers: " + shown(barrier_) + " and " + shown(barrier));
  }
  barrier_ = barrier;
  ++arrived_;
  expect_all_present();
  if (arrived_ < threads_) {
    return false;
  }
  arrived_ = 0;
  return true;
}

void BlockMeeting::end() {
  ++ended_;
  expect_all_present();
}

std::string BlockMeeting::description() const {
  if (arrived_ == 0) {
    return {};
  }
  return std::to_string(arrived_) + " of " + std::to_string(threads_) + " threads wait in " + shown(barrier_);
}

void BlockMeeting::expect_all_present() const {
  if (arrived_ > 0 && ended_ > 0) {
    throw KernelError("not all threads of the block reach a barrier: " + description() + ", " + std::to_string(ended_) +
                      " have ended");
  }
}

}  // namespace emulated_cuda::kernels
