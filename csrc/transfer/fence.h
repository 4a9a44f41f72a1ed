// A position in the device's compute order. A null FencePtr means that there is no need to wait.
//
// Shared by all jobs that wait for it. Thread-safe.
#pragma once

#include <memory>

namespace hydra {

class Fence {
 public:
  Fence() = default;
  Fence(const Fence&) = delete;
  Fence& operator=(const Fence&) = delete;
  virtual ~Fence() = default;

  virtual bool reached() const noexcept = 0;
  /// Blocks the host until reached. Lanes with a device queue let the queue wait instead.
  virtual void wait() noexcept = 0;
};

using FencePtr = std::shared_ptr<Fence>;

}  // namespace hydra
