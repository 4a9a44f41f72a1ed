// What the engine needs of a device: memory for slots, two lanes, and a compute order to wait in.
//
// Two implementations, one contract suite: CUDA and the simulated device. No backend takes the interpreter
// lock. allocate() may run the memory system's own callbacks and so must never be called under a lock of
// the engine. Slots return to the device in compute order: whoever releases one has made compute wait for
// every transfer into it (compute_waits).
#pragma once

#include <string>

#include "csrc/memory/resource.h"
#include "csrc/transfer/lane.h"

namespace hydra {

class DeviceBackend {
 public:
  DeviceBackend() = default;
  DeviceBackend(const DeviceBackend&) = delete;
  DeviceBackend& operator=(const DeviceBackend&) = delete;
  virtual ~DeviceBackend() = default;

  virtual std::string name() const = 0;

  /// Slot memory, not charged to any ledger. Reuse is immediate: memory that allocate() returns may still be
  /// read by compute enqueued before the call, so a lane that writes to it waits for record().
  virtual Resource& slots() noexcept = 0;
  virtual Lane& to_device() noexcept = 0;
  virtual Lane& to_host() noexcept = 0;

  /// The position behind everything the calling thread has enqueued on its compute order. Null when compute
  /// is synchronous.
  virtual FencePtr record() = 0;
  /// Whatever the calling thread's compute does from here on starts after `ticket`. Throws the ticket's
  /// error. Blocks the host where the device has no wait of its own, or until the ticket is enqueued.
  virtual void compute_waits(Ticket& ticket) = 0;
  /// The calling thread has enqueued compute that reads these bytes. Backends that can check it do.
  virtual void note_read(const void* /*pointer*/, Bytes /*bytes*/) {}
  /// The calling thread has enqueued compute that writes these bytes. Backends that can delay it do: until a
  /// fence recorded afterwards is reached, the bytes have to live and belong to no one else.
  virtual void note_write(void* /*pointer*/, Bytes /*bytes*/) {}
};

}  // namespace hydra
