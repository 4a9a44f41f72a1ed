#include "csrc/pytorch/memory/arena_region.h"

namespace hydra {

c10::DataPtr data_pointer_into(const ArenaRegionPtr& region, Bytes offset) {
  auto owner = std::make_unique<ArenaRegionPtr>(region);
  void* const data = region->data() + offset;
  return {data, owner.release(),
          [](void* context) { const std::unique_ptr<ArenaRegionPtr> last(static_cast<ArenaRegionPtr*>(context)); },
          c10::Device(c10::kCPU)};
}

c10::Storage storage_in(const ArenaRegionPtr& region, Bytes offset, Bytes bytes) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), c10::SymInt(bytes),
                                                            data_pointer_into(region, offset),
                                                            /*allocator=*/nullptr, /*resizable=*/false));
}

}  // namespace hydra
