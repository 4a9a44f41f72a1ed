// A resource that counts live bytes, their peak, and calls. Tests use it to show that all memory was released.
//
// The upstream has to outlive it. Thread-safe if the upstream is.
#pragma once

#include <atomic>

#include "csrc/memory/resource.h"

namespace hydra {

struct ResourceStatistics {
  Bytes live_bytes = 0;
  Bytes peak_bytes = 0;
  std::int64_t allocations = 0;
  std::int64_t releases = 0;
};

class TrackedResource final : public Resource {
 public:
  explicit TrackedResource(Resource& upstream) noexcept : upstream_(upstream) {}

  void* allocate(Bytes bytes) override;
  void release(void* pointer, Bytes bytes) noexcept override;
  ResourceStatistics statistics() const noexcept;

 private:
  Resource& upstream_;
  std::atomic<Bytes> live_{0};
  std::atomic<Bytes> peak_{0};
  std::atomic<std::int64_t> allocations_{0};
  std::atomic<std::int64_t> releases_{0};
};

}  // namespace hydra
