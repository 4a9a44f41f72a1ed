#include "csrc/memory/resource.h"

#include <cstdlib>

#include "csrc/base/errors.h"

namespace hydra {

void* HeapResource::allocate(Bytes bytes) {
  HYDRA_EXPECT(bytes > 0, StateError, "cannot allocate " + std::to_string(bytes) + " bytes: ask for at least one");
  // aligned_alloc needs a rounded-up size, which would hide an overrun from the address sanitizer.
  void* pointer = nullptr;
  const int failed =
      ::posix_memalign(&pointer, static_cast<std::size_t>(kPageAlignment), static_cast<std::size_t>(bytes));
  HYDRA_EXPECT(failed == 0, OutOfMemory,
               "host memory: asked for " + human_bytes(bytes) +
                   ", and the heap could not give them; free host memory or use smaller blocks");
  return pointer;
}

void HeapResource::release(void* pointer, Bytes /*bytes*/) noexcept { std::free(pointer); }

}  // namespace hydra
