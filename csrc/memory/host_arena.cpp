#include "csrc/memory/host_arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/base/errors.h"
#include "csrc/base/host_work.h"

namespace hydra {
namespace {

constexpr Bytes kHugePage = 2 * kMiB;
/// The size from which on huge pages and threads pay off.
constexpr Bytes kLarge = 4 * kMiB;
constexpr Bytes kMostTouchers = 4;

Bytes system_page() noexcept {
  static const Bytes page = ::sysconf(_SC_PAGESIZE);
  return page;
}

std::size_t size(Bytes bytes) noexcept { return static_cast<std::size_t>(bytes); }

/// An anonymous mapping. The destructor unmaps it, unless take() has handed it over.
class Mapping {
 public:
  /// Maps `bytes`, a multiple of system_page(). On failure begin() is null and errno is set.
  explicit Mapping(Bytes bytes) noexcept : bytes_(bytes) {
    const bool large = bytes >= kLarge;
    const Bytes spare = large ? kHugePage : 0;
    void* const mapped =
        ::mmap(nullptr, size(bytes + spare), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) {
      return;
    }
    begin_ = static_cast<char*>(mapped);
    if (large) {
      trim(spare);
      // Advice: a kernel without huge pages serves small ones.
      ::madvise(begin_, size(bytes_), MADV_HUGEPAGE);
    }
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (begin_ != nullptr) {
      ::munmap(begin_, size(bytes_));
    }
  }

  char* begin() const noexcept { return begin_; }
  void* take() noexcept { return std::exchange(begin_, nullptr); }

 private:
  /// Moves the beginning to a multiple of the huge page, since only aligned huge pages are used, and unmaps the rest.
  void trim(Bytes spare) noexcept {
    const auto address = reinterpret_cast<std::uintptr_t>(begin_);
    const Bytes head = static_cast<Bytes>((size(kHugePage) - address % size(kHugePage)) % size(kHugePage));
    if (head > 0) {
      ::munmap(begin_, size(head));
    }
    begin_ += head;
    if (head < spare) {
      ::munmap(begin_ + bytes_, size(spare - head));
    }
  }

  char* begin_ = nullptr;
  Bytes bytes_;
};

/// Makes fresh anonymous pages present. They are zero, so writing a zero changes nothing.
void touch(char* begin, Bytes bytes) noexcept {
  for (Bytes offset = 0; offset < bytes; offset += system_page()) {
    *static_cast<volatile char*>(begin + offset) = 0;
  }
}

void touch_in_parallel(char* begin, Bytes bytes) {
  const Bytes cores = std::max<Bytes>(1, std::thread::hardware_concurrency());
  const Bytes touchers = std::min({kMostTouchers, cores, bytes / kLarge});
  const Bytes share = round_up(bytes / touchers, kHugePage);
  std::vector<std::jthread> helpers;
  helpers.reserve(size(touchers));
  Bytes offset = share;  // this thread takes the first share
  try {
    for (; offset < bytes; offset += share) {
      helpers.emplace_back(touch, begin + offset, std::min(share, bytes - offset));
    }
  } catch (const std::system_error&) {
    // The system gives no more threads: this thread touches the rest.
    touch(begin + offset, bytes - offset);
  }
  touch(begin, std::min(share, bytes));
}

}  // namespace

HostArena::HostArena(Pinner* pinner, std::optional<NumaNode> node) noexcept
    : pinner_(pinner), node_(node), owner_process_(::getpid()) {}

HostArena::~HostArena() { unpin_all(); }

Bytes HostArena::mapped_for(Bytes bytes) noexcept { return round_up(bytes, system_page()); }

void* HostArena::allocate(Bytes bytes) {
  HYDRA_EXPECT(bytes > 0, StateError, "cannot allocate " + std::to_string(bytes) + " bytes: ask for at least one");
  HYDRA_EXPECT(!in_forked_child(), StateError,
               "this host arena belongs to process " + std::to_string(owner_process_) +
                   "; create another one in the forked child");
  constexpr Bytes kMost = std::numeric_limits<Bytes>::max() / 2;
  const Bytes mapped = mapped_for(std::min(bytes, kMost));
  Mapping mapping(mapped);
  const int reason = errno;
  HYDRA_EXPECT(mapping.begin() != nullptr, OutOfMemory,
               "host arena: asked for " + human_bytes(bytes) + " with " + human_bytes(mapped_bytes()) +
                   " already mapped: " + std::generic_category().message(reason) +
                   "; free host memory, raise the limit on address space (ulimit -v), or keep blocks on disk");
  if (node_) {
    prefer_numa_node(*node_, mapping.begin(), mapped);  // before the first touch, which takes the pages
  }
  if (mapped >= kLarge && !host_work_taken(mapped)) {
    touch_in_parallel(mapping.begin(), mapped);
  }
  {
    const std::lock_guard lock(mutex_);
    regions_.emplace(mapping.begin(), Region{.mapped = mapped});
  }
  void* const pointer = mapping.take();
  if (pinner_ != nullptr) {
    pin(pointer, mapped);
  }
  return pointer;
}

void HostArena::pin(void* pointer, Bytes mapped) noexcept {
  // Before pinning: a fork in between would leave the child with pages that are about to be pinned.
  ::madvise(pointer, size(mapped), MADV_DONTFORK);
  const bool pinned = pinner_->pin(pointer, mapped);
  if (!pinned) {
    ::madvise(pointer, size(mapped), MADV_DOFORK);
  }
  const std::lock_guard lock(mutex_);
  Region& region = regions_.at(pointer);
  region.pinned = pinned;
  region.refused = !pinned;
}

void HostArena::unpin(void* pointer, Bytes mapped) noexcept {
  pinner_->unpin(pointer, mapped);
  ::madvise(pointer, size(mapped), MADV_DOFORK);
}

void HostArena::release(void* pointer, Bytes /*bytes*/) noexcept {
  if (in_forked_child()) {
    return;  // the child has no such region, and something else may lie at its address
  }
  Region region;
  {
    const std::lock_guard lock(mutex_);
    const auto found = regions_.find(pointer);
    if (found == regions_.end()) {
      return;
    }
    region = found->second;
    regions_.erase(found);
  }
  if (region.pinned) {
    pinner_->unpin(pointer, region.mapped);
  }
  ::munmap(pointer, size(region.mapped));
}

void HostArena::unpin_all() noexcept {
  if (in_forked_child()) {
    return;
  }
  // The lock is held, so that no other thread releases and unmaps a region while it is being un-pinned.
  const std::lock_guard lock(mutex_);
  for (auto& [pointer, region] : regions_) {
    if (region.pinned) {
      unpin(pointer, region.mapped);
      region.pinned = false;
    }
  }
}

Bytes HostArena::mapped_bytes() const noexcept {
  return sum([](const Region& region) { return region.mapped; });
}

Bytes HostArena::pinned_bytes() const noexcept {
  return sum([](const Region& region) { return region.pinned ? region.mapped : 0; });
}

Bytes HostArena::pageable_bytes() const noexcept {
  return sum([](const Region& region) { return region.refused ? region.mapped : 0; });
}

bool HostArena::in_forked_child() const noexcept { return ::getpid() != owner_process_; }

Bytes HostArena::sum(Bytes (*of)(const Region&)) const noexcept {
  if (in_forked_child()) {
    return 0;
  }
  const std::lock_guard lock(mutex_);
  Bytes total = 0;
  for (const auto& [pointer, region] : regions_) {
    total += of(region);
  }
  return total;
}

}  // namespace hydra
