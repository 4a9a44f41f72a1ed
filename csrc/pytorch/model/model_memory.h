// The memory of one model: its budget on the device, what draws on it, and the host arena.
//
// Owns the account, which tensors may outlive, and the resources that slots and optimizer state come from. open() says
// what is asked when the budget is used up; close() ends that. Threads: any; open(), stop_serving() and close() alone.
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

  /// `relieve` and `explain` are as an Account's; `evict_one` as a MemoryClient's.
  void open(std::function<bool()> relieve, std::function<std::string()> explain, std::function<bool()> evict_one);
  /// `evict_one` is not called any more.
  void stop_serving() noexcept { service_.reset(); }
  /// Buffers are counted down; nothing is charged any more.
  void close() noexcept;

  DeviceBackend& backend() const noexcept { return *backend_; }
  const std::shared_ptr<HostArena>& arena() const noexcept { return arena_; }
  Ledger& ledger() const noexcept { return account_->ledger(); }
  Resource& slots() noexcept { return slots_; }
  Resource& optimizer_state() noexcept { return optimizer_state_; }
  /// What the calling thread's allocations on the host are charged to: the simulated device's memory is there.
  AccountPtr charged() const { return simulated_ ? account_ : nullptr; }
  /// Buffers that live on the device until close(), where no allocator of the device counts them.
  void charge_buffers(Bytes bytes);
  /// Whether allocations are about to miss, on a device whose allocator cannot wait for room.
  bool crowded() const { return backend_->crowded(budget_); }
  /// Bytes that the device has given to slots and optimizer state, and has not got back.
  Bytes slot_bytes() const noexcept { return tracked_.statistics().live_bytes; }
  /// What the device holds, by class, in words.
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
