// One region of the host arena, shared by the storages that lie in it.
//
// The last owner returns the region. Storages own it through their data pointers, so that parameters and gradients may
// outlive the context that moved them there. Keeps the arena alive. Sizes and offsets are bytes.
#pragma once

#include <c10/core/Storage.h>

#include <memory>

#include "csrc/memory/host_arena.h"

namespace hydra {

class ArenaRegion {
 public:
  ArenaRegion(std::shared_ptr<HostArena> arena, Bytes bytes)
      : arena_(std::move(arena)), bytes_(bytes), data_(static_cast<std::byte*>(arena_->allocate(bytes))) {}
  ~ArenaRegion() { arena_->release(data_, bytes_); }
  ArenaRegion(const ArenaRegion&) = delete;
  ArenaRegion& operator=(const ArenaRegion&) = delete;

  std::byte* data() const noexcept { return data_; }
  Bytes bytes() const noexcept { return bytes_; }

 private:
  std::shared_ptr<HostArena> arena_;
  Bytes bytes_;
  std::byte* data_;
};

using ArenaRegionPtr = std::shared_ptr<ArenaRegion>;

/// Returns a data pointer at `offset` that keeps the region alive.
c10::DataPtr data_pointer_into(const ArenaRegionPtr& region, Bytes offset);
/// Returns a storage of `bytes` at `offset` that keeps the region alive and cannot be resized.
c10::Storage storage_in(const ArenaRegionPtr& region, Bytes offset, Bytes bytes);

}  // namespace hydra
