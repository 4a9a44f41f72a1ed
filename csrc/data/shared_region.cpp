#include "csrc/data/shared_region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <string>

#include "csrc/base/errors.h"

namespace hydra {
namespace {

constexpr Bytes kGrain = 64 * kKiB;  // of growth: a call of the system for each block would be slow

std::string reason() { return std::string(std::strerror(errno)) + " (errno " + std::to_string(errno) + ")"; }

/// fallocate() that goes on after a signal. Returns whether it could.
bool allocate_pages(int descriptor, int mode, Bytes begin, Bytes bytes) noexcept {
  int result = 0;
  do {
    result = ::fallocate(descriptor, mode, begin, bytes);
  } while (result != 0 && errno == EINTR);
  return result == 0;
}

}  // namespace

SharedRegion::SharedRegion(Bytes most) : most_(round_up(most, kGrain)), owner_(::getpid()), limit_(most_) {
  HYDRA_EXPECT(most > 0, StateError, "a shared region of " + std::to_string(most) + " bytes: give at least one");
  descriptor_ = ::memfd_create("hydra_ext data", MFD_CLOEXEC);
  HYDRA_EXPECT(descriptor_ >= 0, OutOfMemory, "no memory could be shared with workers: " + reason());
  void* mapped = MAP_FAILED;
  if (::ftruncate(descriptor_, most_) == 0) {
    mapped = ::mmap(nullptr, static_cast<std::size_t>(most_), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  }
  if (mapped == MAP_FAILED) {
    const std::string why = reason();
    ::close(descriptor_);
    throw OutOfMemory(human_bytes(most_) + " could not be shared with workers: " + why + ": give a smaller memory=");
  }
  data_ = static_cast<std::byte*>(mapped);
}

SharedRegion::~SharedRegion() {
  ::munmap(data_, static_cast<std::size_t>(most_));
  ::close(descriptor_);
}

std::optional<Bytes> SharedRegion::allocate(Bytes bytes) {
  HYDRA_EXPECT(bytes > 0, StateError, "a block of " + std::to_string(bytes) + " bytes: give at least one");
  const Bytes size = round_up(bytes, kBlockAlignment);
  const std::lock_guard lock(mutex_);
  std::optional<Bytes> found = take(size);
  if (!found && grow(size)) {
    found = take(size);
  }
  return found;
}

/// The smallest free range that has room: large ones stay whole.
std::optional<Bytes> SharedRegion::take(Bytes bytes) {
  auto best = free_.end();
  for (auto each = free_.begin(); each != free_.end(); ++each) {
    const bool fits = each->second >= bytes && each->first + bytes <= limit_;
    if (fits && (best == free_.end() || each->second < best->second)) {
      best = each;
    }
  }
  if (best == free_.end()) {
    return std::nullopt;
  }
  const auto [begin, size] = *best;
  free_.erase(best);
  if (size > bytes) {
    free_.emplace(begin + bytes, size - bytes);
  }
  blocks_.emplace(begin, bytes);
  used_ += bytes;
  return begin;
}

/// Makes a free range of so many bytes at the end. Returns false if the limit is below it.
bool SharedRegion::grow(Bytes bytes) {
  const auto last = free_.empty() ? free_.end() : std::prev(free_.end());
  const bool at_end = last != free_.end() && last->first + last->second == end_;
  const Bytes begin = at_end ? last->first : end_;
  if (begin + bytes > limit_) {
    return false;
  }
  const Bytes end = std::min(round_up(begin + bytes, kGrain), most_);
  HYDRA_EXPECT(allocate_pages(descriptor_, 0, end_, end - end_), OutOfMemory,
               "the system has no memory for results of workers: " + human_bytes(end) + " were asked for, and it has " +
                   human_bytes(end_) + " given: " + reason() + ": give a smaller memory=");
  free_[begin] = end - begin;
  end_ = end;
  return true;
}

void SharedRegion::release(Bytes offset) {
  if (::getpid() != owner_) {
    return;
  }
  const std::lock_guard lock(mutex_);
  const auto block = blocks_.find(offset);
  HYDRA_EXPECT(block != blocks_.end(), StateError, "no block starts at " + std::to_string(offset));
  auto [begin, size] = *block;
  blocks_.erase(block);
  used_ -= size;
  const auto behind = free_.find(begin + size);
  if (behind != free_.end()) {
    size += behind->second;
    free_.erase(behind);
  }
  auto before = free_.lower_bound(begin);
  const bool is_first = before == free_.begin();
  if (!is_first) {
    --before;
  }
  if (!is_first && before->first + before->second == begin) {
    before->second += size;
  } else {
    free_.emplace(begin, size);
  }
  if (end_ > limit_) {
    give_back(limit_);
  }
}

void SharedRegion::set_limit(Bytes limit) {
  const std::lock_guard lock(mutex_);
  HYDRA_EXPECT(limit >= 0 && limit <= most_, StateError,
               "a limit of " + std::to_string(limit) + " bytes: give 0 to " + std::to_string(most_));
  limit_ = limit;
  if (end_ > limit_) {
    give_back(limit_);
  }
}

void SharedRegion::trim() noexcept {
  if (::getpid() != owner_) {
    return;
  }
  const std::lock_guard lock(mutex_);
  give_back(0);
}

/// Gives pages back that are behind the last block, and behind `begin`.
void SharedRegion::give_back(Bytes begin) noexcept {
  if (free_.empty()) {
    return;
  }
  const auto last = std::prev(free_.end());
  if (last->first + last->second != end_) {
    return;
  }
  const Bytes keep = round_up(std::max(begin, last->first), kGrain);
  if (keep >= end_ || !allocate_pages(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, keep, end_ - keep)) {
    return;
  }
  end_ = keep;
  if (last->first >= keep) {
    free_.erase(last);
  } else {
    last->second = keep - last->first;
  }
}

Bytes SharedRegion::limit() const noexcept {
  const std::lock_guard lock(mutex_);
  return limit_;
}

Bytes SharedRegion::used() const noexcept {
  const std::lock_guard lock(mutex_);
  return used_;
}

Bytes SharedRegion::allocated() const noexcept {
  const std::lock_guard lock(mutex_);
  return end_;
}

}  // namespace hydra
