#include "csrc/testing/file_faults.h"

#include <algorithm>

namespace hydra::testing {
namespace {

constexpr Bytes kSector = 512;

std::size_t index(FileOperation operation) noexcept { return static_cast<std::size_t>(operation); }

Bytes shortened(Bytes bytes) noexcept { return std::max<Bytes>(bytes / 2 / kSector * kSector, 1); }

}  // namespace

void FaultyFiles::fail(FileOperation operation, FileFault fault, std::int64_t nth, bool persistent, int error) {
  const std::lock_guard lock(mutex_);
  rules_.push_back({.operation = operation,
                    .fault = fault,
                    .number = counts_[index(operation)] + nth,
                    .persistent = persistent,
                    .error = error});
}

void FaultyFiles::reset() {
  const std::lock_guard lock(mutex_);
  rules_.clear();
  counts_ = {};
  met_ = hints_ = 0;
}

std::int64_t FaultyFiles::count(FileOperation operation) const {
  const std::lock_guard lock(mutex_);
  return counts_[index(operation)];
}

std::int64_t FaultyFiles::met() const {
  const std::lock_guard lock(mutex_);
  return met_;
}

std::optional<FaultyFiles::Rule> FaultyFiles::next(FileOperation operation) {
  const std::lock_guard lock(mutex_);
  const std::int64_t number = ++counts_[index(operation)];
  const auto met = std::find_if(rules_.begin(), rules_.end(), [&](const Rule& rule) {
    return rule.operation == operation && (rule.number == number || (rule.persistent && rule.number < number));
  });
  if (met == rules_.end()) {
    return std::nullopt;
  }
  ++met_;
  return *met;
}

int FaultyFiles::open_unnamed(const char* folder) {
  const auto rule = next(FileOperation::kOpen);
  return rule ? -rule->error : files_.open_unnamed(folder);
}

int FaultyFiles::bypass_cache(int descriptor, bool bypass) {
  const auto rule = next(FileOperation::kBypass);
  return rule ? -rule->error : files_.bypass_cache(descriptor, bypass);
}

int FaultyFiles::allocate(int descriptor, Bytes offset, Bytes bytes) {
  const auto rule = next(FileOperation::kAllocate);
  return rule ? -rule->error : files_.allocate(descriptor, offset, bytes);
}

ssize_t FaultyFiles::read(int descriptor, void* data, Bytes bytes, Bytes offset) {
  const auto rule = next(FileOperation::kRead);
  if (rule && rule->fault == FileFault::kError) {
    return -rule->error;
  }
  const bool is_short = rule && rule->fault == FileFault::kShort;
  const ssize_t done = files_.read(descriptor, data, is_short ? std::max(shortened(bytes), kSector) : bytes, offset);
  if (rule && rule->fault == FileFault::kFlipped && done > 0) {
    static_cast<std::uint8_t*>(data)[done / 2] ^= 0x10U;
  }
  return is_short ? std::min<ssize_t>(done, shortened(bytes)) : done;
}

ssize_t FaultyFiles::write(int descriptor, const void* data, Bytes bytes, Bytes offset) {
  const auto rule = next(FileOperation::kWrite);
  if (!rule) {
    return files_.write(descriptor, data, bytes, offset);
  }
  switch (rule->fault) {
    case FileFault::kError:
      return -rule->error;
    case FileFault::kShort:
      return std::min<ssize_t>(files_.write(descriptor, data, bytes, offset), shortened(bytes));
    case FileFault::kDropped:
    case FileFault::kFlipped:
      break;
  }
  return bytes;
}

void FaultyFiles::close(int descriptor) noexcept { files_.close(descriptor); }

void FaultyFiles::will_need(int descriptor, Bytes offset, Bytes bytes) noexcept {
  {
    const std::lock_guard lock(mutex_);
    ++hints_;
  }
  files_.will_need(descriptor, offset, bytes);
}

std::int64_t FaultyFiles::hints() const {
  const std::lock_guard lock(mutex_);
  return hints_;
}

}  // namespace hydra::testing
