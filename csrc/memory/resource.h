// Where host memory comes from: two methods, features by wrapping.
//
// A resource hands out memory aligned to kPageAlignment. Thread-safe. `release` takes the size that
// was asked for. Wrappers hold their upstream by reference, which has to outlive them.
#pragma once

#include "csrc/base/types.h"

namespace hydra {

class Resource {
 public:
  Resource() = default;
  Resource(const Resource&) = delete;
  Resource& operator=(const Resource&) = delete;
  virtual ~Resource() = default;

  /// Memory of exactly `bytes` (> 0, else StateError). Throws OutOfMemory; then nothing has changed.
  virtual void* allocate(Bytes bytes) = 0;
  virtual void release(void* pointer, Bytes bytes) noexcept = 0;
};

/// Plain heap memory.
class HeapResource final : public Resource {
 public:
  void* allocate(Bytes bytes) override;
  void release(void* pointer, Bytes bytes) noexcept override;
};

}  // namespace hydra
