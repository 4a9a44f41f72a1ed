// A position in the device's compute order. Null stands for "nothing to wait for".
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
  /// Blocks the host until reached. Lanes with a device queue wait there instead.
  virtual void wait() noexcept = 0;
};

using FencePtr = std::shared_ptr<Fence>;

}  // namespace hydra
