// The interface of a device for the engine: memory for slots, two lanes, and a compute order to wait in.
//
// CUDA and the simulated device implement it; both pass one contract suite. Owns its lanes and its slots' memory.
// Backends do not take the interpreter lock. The slots' allocate() may run callbacks of the memory system, so it must
// not be called under a lock of the engine. Slots return to the device in compute order: their owner calls
// slot_returns() before it releases one. Times are seconds, sizes are bytes. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "csrc/memory/resource.h"
#include "csrc/transfer/lane.h"
#include "csrc/transfer/stall_log.h"

namespace hydra {

/// A run's budget and its way to make room, for the backend.
struct MemoryClient {
  Bytes budget = 0;
  /// Frees some memory of the run's on the device. May block. Returns false if none can be freed.
  std::function<bool()> make_room;
  /// Says where the run is, what it holds, and what helps: the second half of an out-of-memory message.
  std::function<std::string()> explain;
};

/// What a device's allocator does beside the ledger. Without functions the ledger sees every byte.
struct DeviceMeter {
  /// Returns the most bytes that were allocated outside of slots() since its last call.
  std::function<Bytes()> take_peak{};
  /// Says what is held now, for messages.
  std::function<std::string()> describe{};
  /// The part of the budget that plans leave free, because the allocator may not be able to use it.
  Bytes slack = 0;
};

class DeviceBackend {
 public:
  DeviceBackend() = default;
  DeviceBackend(const DeviceBackend&) = delete;
  DeviceBackend& operator=(const DeviceBackend&) = delete;
  virtual ~DeviceBackend() = default;

  virtual std::string name() const = 0;

  /// The log of the lanes' activities. Users of the device add theirs.
  ActivityLog& activity() noexcept { return activity_; }

  /// Slot memory, which is charged to no ledger. Reuse is immediate: compute enqueued before allocate() may still read
  /// the memory it returns, so a lane that writes to the memory waits for record().
  virtual Resource& slots() noexcept = 0;
  virtual Lane& to_device() noexcept = 0;
  virtual Lane& to_host() noexcept = 0;

  /// Returns a fence behind all compute that the calling thread has enqueued. Null if compute is synchronous.
  virtual FencePtr record() = 0;
  /// Returns a fence at the end of a single operation. Null if any later record() covers the operation.
  virtual FencePtr record_use() { return nullptr; }
  /// Makes the calling thread's later compute start after `ticket`. Throws the ticket's error. Blocks the host until
  /// the ticket is enqueued; without device-side waits, until the ticket has finished.
  virtual void compute_waits(Ticket& ticket) = 0;
  /// Makes the calling thread's later compute start after `fence`, which may be null. Blocks the host if the device has
  /// no device-side waits.
  virtual void compute_follows(const FencePtr& fence);
  /// Prepares the release of a slot: compute on the next use of its memory starts after `ticket`, which may be null,
  /// and after `fences`. Does not wait for a lane or another thread if the ticket is enqueued.
  virtual void slot_returns(Ticket* ticket, const std::vector<FencePtr>& fences) noexcept;
  /// Throws StateError if the calling thread's compute must not use a slot now, because it records addresses for later
  /// use (CUDA graphs).
  virtual void expect_usable() {}
  /// Where waits of compute are noted. Null if compute runs on the host's threads, whose own time has no waits.
  virtual StallLog* stalls() noexcept { return nullptr; }
  /// Serves a run until the result is destroyed: keeps memory that the engine does not allocate within the run's
  /// budget. Null if the ledger sees every byte.
  virtual std::shared_ptr<void> serve(MemoryClient /*client*/) { return nullptr; }
  /// For a run with this budget. The result must not outlive the backend.
  virtual DeviceMeter meter(Bytes /*budget*/) { return {}; }
  /// The bytes per second that optimizer steps on the host may read and write; 0 sets no limit.
  virtual double host_memory_bytes_per_second() const noexcept { return 0.0; }
  /// Tells that the calling thread has enqueued compute that reads these bytes. Some backends check such reads.
  virtual void note_read(const void* /*pointer*/, Bytes /*bytes*/) {}
  /// Tells that the calling thread has enqueued compute that writes these bytes. Some backends delay such writes. Until
  /// a fence recorded afterwards is reached, the bytes have to stay alive and unshared; other compute on them has to
  /// follow that fence (compute_follows).
  virtual void note_write(void* /*pointer*/, Bytes /*bytes*/) {}

 private:
  ActivityLog activity_;  // outlives the lanes, which subclasses own
};

}  // namespace hydra
