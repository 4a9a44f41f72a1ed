// A resource under a budget. It charges a ledger before it asks upstream, and discharges the bytes if upstream fails.
//
// Owns neither the ledger nor the upstream, which have to outlive it. Thread-safe if the upstream is.
#pragma once

#include "csrc/memory/ledger.h"
#include "csrc/memory/resource.h"

namespace hydra {

class LimitedResource final : public Resource {
 public:
  /// Charges and discharges bytes of the class `cls`.
  LimitedResource(Resource& upstream, Ledger& ledger, MemoryClass cls) noexcept
      : upstream_(upstream), ledger_(ledger), class_(cls) {}

  /// Throws OutOfMemory with the bytes asked for, in use, and allowed if the ledger refuses. Upstream is not asked
  /// then.
  void* allocate(Bytes bytes) override;
  void release(void* pointer, Bytes bytes) noexcept override;

 private:
  Resource& upstream_;
  Ledger& ledger_;
  MemoryClass class_;
};

}  // namespace hydra
