#include "csrc/memory/limited_resource.h"

#include "csrc/base/errors.h"

namespace hydra {

void* LimitedResource::allocate(Bytes bytes) {
  HYDRA_EXPECT(bytes > 0, StateError, "cannot allocate " + std::to_string(bytes) + " bytes: ask for at least one");
  HYDRA_EXPECT(ledger_.try_charge(class_, bytes), OutOfMemory,
               std::string("asked for ") + human_bytes(bytes) + " of " + name(class_) + " with " +
                   human_bytes(ledger_.in_use()) + " in use of a budget of " + human_bytes(ledger_.limit()) +
                   "; raise the budget, or use smaller blocks or microbatches");
  try {
    return upstream_.allocate(bytes);
  } catch (...) {
    ledger_.discharge(class_, bytes);
    throw;
  }
}

void LimitedResource::release(void* pointer, Bytes bytes) noexcept {
  upstream_.release(pointer, bytes);
  ledger_.discharge(class_, bytes);
}

}  // namespace hydra
