// One of several runs' views of a device that they share: the device's lanes and memory, with figures of its own.
//
// Jobs go to the device's lanes, which tell runs apart by their logs. Statistics, the activity log and drain() are
// those of this run's jobs. Shares the device, which ends with its last run. Thread-safe; as DeviceBackend.
#pragma once

#include <memory>
#include <string>

#include "csrc/transfer/device_backend.h"

namespace hydra {

class SharedBackend final : public DeviceBackend {
 public:
  explicit SharedBackend(std::shared_ptr<DeviceBackend> device);
  ~SharedBackend() override;

 private:
  friend DeviceBackend& device_of(DeviceBackend& backend) noexcept;
  class SharedLane;

  std::string name() const override { return device_->name(); }
  Resource& slots() noexcept override { return device_->slots(); }
  Lane& to_device() noexcept override;
  Lane& to_host() noexcept override;
  FencePtr record() override { return device_->record(); }
  FencePtr record_use() override { return device_->record_use(); }
  void compute_waits(Ticket& ticket) override { device_->compute_waits(ticket); }
  void compute_follows(const FencePtr& fence) override { device_->compute_follows(fence); }
  void slot_returns(Ticket* ticket, const std::vector<FencePtr>& fences) noexcept override {
    device_->slot_returns(ticket, fences);
  }
  void expect_usable() override { device_->expect_usable(); }
  StallLog* stalls() noexcept override { return device_->stalls(); }
  std::shared_ptr<void> serve(MemoryClient client) override { return device_->serve(std::move(client)); }
  DeviceMeter meter(Bytes budget) override { return device_->meter(budget); }
  double host_memory_bytes_per_second() const noexcept override { return device_->host_memory_bytes_per_second(); }
  void note_read(const void* pointer, Bytes bytes) override { device_->note_read(pointer, bytes); }
  void note_write(void* pointer, Bytes bytes) override { device_->note_write(pointer, bytes); }

  std::shared_ptr<DeviceBackend> device_;
  std::unique_ptr<SharedLane> to_device_;  // they drain before the log ends, to which their jobs write
  std::unique_ptr<SharedLane> to_host_;
};

/// The device itself behind a run's view, for what only some devices can do.
DeviceBackend& device_of(DeviceBackend& backend) noexcept;

}  // namespace hydra
