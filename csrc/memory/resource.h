// The interface of sources of host memory. Wrappers add features to other resources.
//
// A resource gives memory aligned to kPageAlignment; the caller owns it until release(). release() takes the size that
// allocate() was asked for, in bytes. A wrapper refers to its upstream, which has to outlive it. Thread-safe.
#pragma once

#include "csrc/base/types.h"

namespace hydra {

class Resource {
 public:
  Resource() = default;
  Resource(const Resource&) = delete;
  Resource& operator=(const Resource&) = delete;
  virtual ~Resource() = default;

  /// Returns memory of exactly `bytes`. Throws StateError unless `bytes` > 0. Throws OutOfMemory if there is no such
  /// memory; then nothing has changed.
  virtual void* allocate(Bytes bytes) = 0;
  virtual void release(void* pointer, Bytes bytes) noexcept = 0;
  /// The bytes that an allocation of `bytes` takes.
  virtual Bytes taken_by(Bytes bytes) const noexcept { return bytes; }
};

/// Memory from the heap.
class HeapResource final : public Resource {
 public:
  void* allocate(Bytes bytes) override;
  void release(void* pointer, Bytes bytes) noexcept override;
};

}  // namespace hydra
