// The memory of one model: its budget on the device, the resources that draw on it, and the host arena.
//
// Owns the resources of slots and optimizer state, and shares the account with tensors, which may outlive it. open()
// sets the callbacks for a budget that is used up; close() removes them.
// Threads: any; nothing else runs during open(), stop_serving() and close().
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "csrc/memory/host_arena.h"
#include "csrc/memory/limited_resource.h"
#include "csrc/memory/tracked_resource.h"
#include "csrc/pytorch/memory/account.h"
#include "csrc/transfer/device_backend.h"

namespace hydra {

class ModelMemory {
 public:
  ModelMemory(std::shared_ptr<DeviceBackend> backend, std::shared_ptr<HostArena> arena, Bytes budget, bool simulated);

  /// `relieve` and `explain`: see Account. The device calls both too (MemoryClient).
  void open(const std::function<bool()>& relieve, const std::function<std::string()>& explain);
  /// Guarantees that the device does not call them any more.
  void stop_serving() noexcept { service_.reset(); }
  /// Discharges the buffers. Nothing is charged any more.
  void close() noexcept;

  DeviceBackend& backend() const noexcept { return *backend_; }
  const std::shared_ptr<HostArena>& arena() const noexcept { return arena_; }
  Ledger& ledger() const noexcept { return account_->ledger(); }
  Resource& slots() noexcept { return slots_; }
  Resource& optimizer_state() noexcept { return optimizer_state_; }
  /// The account that host allocations are charged to on the simulated device, whose memory they are; otherwise null.
  AccountPtr charged() const { return simulated_ ? account_ : nullptr; }
  /// Charges buffers that live on the device until close(), if the device's allocator does not count them.
  void charge_buffers(Bytes bytes);
  /// The bytes of slots and optimizer state that the device has allocated and that were not released.
  Bytes slot_bytes() const noexcept { return tracked_.statistics().live_bytes; }
  DeviceMeter meter() const { return backend_->meter(budget_); }
  /// Describes the memory that the device holds, by class.
  std::string describe() const;

 private:
  std::shared_ptr<DeviceBackend> backend_;
  std::shared_ptr<HostArena> arena_;
  const Bytes budget_;
  const bool simulated_;
  AccountPtr account_;
  TrackedResource tracked_;
  LimitedResource slots_;
  LimitedResource optimizer_state_;
  std::shared_ptr<void> service_;
  Bytes buffer_bytes_ = 0;
};

}  // namespace hydra
