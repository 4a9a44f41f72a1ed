// What the engine needs of a device: memory for slots, two lanes, and a compute order to wait in.
//
// Two implementations, one contract suite: CUDA and the simulated device. No backend takes the interpreter
// lock. allocate() may run the memory system's own callbacks and so must never be called under a lock of
// the engine. Slots return to the device in compute order: their owner calls slot_returns() before it releases one.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "csrc/memory/resource.h"
#include "csrc/transfer/lane.h"

namespace hydra {

/// What a run lends its backend.
struct MemoryClient {
  Bytes budget = 0;
  /// Takes one block's slot away without ever blocking. False when there is none to take.
  std::function<bool()> evict_one;
};

class DeviceBackend {
 public:
  DeviceBackend() = default;
  DeviceBackend(const DeviceBackend&) = delete;
  DeviceBackend& operator=(const DeviceBackend&) = delete;
  virtual ~DeviceBackend() = default;

  virtual std::string name() const = 0;

  /// What the lanes did; users of the device record the rest here.
  ActivityLog& activity() noexcept { return activity_; }

  /// Slot memory, not charged to any ledger. Reuse is immediate: memory that allocate() returns may still be
  /// read by compute enqueued before the call, so a lane that writes to it waits for record().
  virtual Resource& slots() noexcept = 0;
  virtual Lane& to_device() noexcept = 0;
  virtual Lane& to_host() noexcept = 0;

  /// The position behind everything the calling thread has enqueued on its compute order. Null when compute
  /// is synchronous.
  virtual FencePtr record() = 0;
  /// As record(), for the end of a single operation. Null when any later record() will cover it.
  virtual FencePtr record_use() { return nullptr; }
  /// Whatever the calling thread's compute does from here on starts after `ticket`. Throws the ticket's
  /// error. Blocks the host where the device has no wait of its own, or until the ticket is enqueued.
  virtual void compute_waits(Ticket& ticket) = 0;
  /// As that, after `fence` (may be null). Blocks the host where the device has no wait of its own.
  virtual void compute_follows(const FencePtr& fence);
  /// A slot is about to be released: compute on whatever its memory becomes starts after `ticket` (may be null)
  /// and after `fences`. Does not wait for a lane or another thread if the ticket is enqueued.
  virtual void slot_returns(Ticket* ticket, const std::vector<FencePtr>& fences) noexcept;
  /// Throws StateError when the calling thread's compute must not use a slot now: where addresses are recorded
  /// to be used again later.
  virtual void expect_usable() {}
  /// Serves a run until the result is destroyed: keeps memory that the engine does not hand out to the run's
  /// budget. Null where the ledger sees every byte.
  virtual std::shared_ptr<void> serve(MemoryClient /*client*/) { return nullptr; }
  /// Counts what others than slots() took at most since its last call. Empty where the ledger sees every byte.
  virtual std::function<Bytes()> activation_meter() { return {}; }
  /// Whether allocations of others are about to miss under this budget, where its client cannot be waited for then.
  virtual bool crowded(Bytes /*budget*/) const { return false; }
  /// What optimizer steps on the host may read and write in a second; 0 for as much as the host can.
  virtual double host_memory_bytes_per_second() const noexcept { return 0.0; }
  /// The calling thread has enqueued compute that reads these bytes. Backends that can check it do.
  virtual void note_read(const void* /*pointer*/, Bytes /*bytes*/) {}
  /// The calling thread has enqueued compute that writes these bytes. Backends that can delay it do: until a
  /// fence recorded afterwards is reached, the bytes have to live and belong to nothing else, and what else computes
  /// with them follows it (compute_follows).
  virtual void note_write(void* /*pointer*/, Bytes /*bytes*/) {}

 private:
  ActivityLog activity_;  // outlives the lanes, which are a subclass's
};

}  // namespace hydra
