// A resource under a budget: charges a ledger before it asks upstream, and gives back what failed.
#pragma once

#include "csrc/memory/ledger.h"
#include "csrc/memory/resource.h"

namespace hydra {

class LimitedResource final : public Resource {
 public:
  /// Both references have to outlive the resource.
  LimitedResource(Resource& upstream, Ledger& ledger, MemoryClass cls) noexcept
      : upstream_(upstream), ledger_(ledger), class_(cls) {}

  /// Throws OutOfMemory with asked, in use and limit when the ledger refuses; upstream is not asked then.
  void* allocate(Bytes bytes) override;
  void release(void* pointer, Bytes bytes) noexcept override;

 private:
  Resource& upstream_;
  Ledger& ledger_;
  MemoryClass class_;
};

}  // namespace hydra
