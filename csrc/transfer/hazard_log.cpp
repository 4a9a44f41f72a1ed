#include "csrc/transfer/hazard_log.h"

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdio>

namespace hydra {
namespace {

std::string hexadecimal(std::uintptr_t address) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "0x%" PRIxPTR, address);
  return text.data();
}

}  // namespace

void HazardLog::compute_reads(const void* pointer, Bytes bytes, Position position) {
  const std::lock_guard lock(mutex_);
  Access& access = accesses_[range(pointer, bytes)];
  access.last_read = std::max(access.last_read, position);
}

void HazardLog::compute_writes(const void* pointer, Bytes bytes, Position position) {
  const std::lock_guard lock(mutex_);
  Access& access = accesses_[range(pointer, bytes)];
  access.last_write = std::max(access.last_write, position);
}

void HazardLog::copy_overwrites(const void* pointer, Bytes bytes, Position seen) {
  check(range(pointer, bytes), seen, true);
}

void HazardLog::copy_reads(const void* pointer, Bytes bytes, Position seen) {
  check(range(pointer, bytes), seen, false);
}

std::int64_t HazardLog::count() const {
  const std::lock_guard lock(mutex_);
  return count_;
}

std::string HazardLog::first() const {
  const std::lock_guard lock(mutex_);
  return first_;
}

HazardLog::Range HazardLog::range(const void* pointer, Bytes bytes) noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(pointer);
  return {begin, begin + static_cast<std::uintptr_t>(bytes)};
}

void HazardLog::check(Range copied, Position seen, bool overwrites) {
  const std::lock_guard lock(mutex_);
  std::erase_if(accesses_, [seen](const auto& entry) {
    return std::max(entry.second.last_read, entry.second.last_write) <= seen;
  });
  const auto hit = std::ranges::find_if(accesses_, [&](const auto& entry) {
    const auto& [touched, access] = entry;
    const Position last = overwrites ? std::max(access.last_read, access.last_write) : access.last_write;
    return touched.first < copied.second && copied.first < touched.second && last > seen;
  });
  if (hit == accesses_.end()) {
    return;
  }
  ++count_;
  if (!first_.empty()) {
    return;
  }
  const auto& [touched, access] = *hit;
  const bool written = access.last_write > seen;
  first_ = std::string(overwrites ? "a copy to the device overwrote " : "a copy to the host read ") +
           std::to_string(copied.second - copied.first) + " bytes at " + hexadecimal(copied.first) + ", but " +
           std::to_string(touched.second - touched.first) + " bytes at " + hexadecimal(touched.first) +
           " are still being " + (written ? "written" : "read") + " by kernel " +
           std::to_string(written ? access.last_write : access.last_read) + " and only kernels up to " +
           std::to_string(seen) + " were seen to end: give the job a fence recorded after that kernel";
}

}  // namespace hydra
