#include "csrc/transfer/simulated_device.h"

#include <cstring>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "csrc/base/errors.h"
#include "csrc/transfer/compute_lane.h"
#include "csrc/transfer/simulated_lane.h"

namespace hydra {
namespace {

void fill_with_poison(void* pointer, Bytes bytes) noexcept {
  std::memset(pointer, SimulatedDevice::kPoison, static_cast<std::size_t>(bytes));
}

}  // namespace

/// Slot memory from the heap. In the asynchronous mode it keeps released slots by size for the next
/// allocation: only immediate reuse shows a missing fence.
class SimulatedSlots final : public Resource {
 public:
  SimulatedSlots(bool poison, bool keep, std::shared_ptr<FaultInjector> faults) noexcept
      : poison_(poison), keep_(keep), faults_(std::move(faults)) {}

  ~SimulatedSlots() override {
    for (const auto& [bytes, slots] : kept_) {
      for (void* const slot : slots) {
        heap_.release(slot, bytes);
      }
    }
  }

  void* allocate(Bytes bytes) override {
    if (faults_) {
      faults_->before_slot(bytes);
    }
    void* slot = take_kept(bytes);
    if (slot == nullptr) {
      slot = heap_.allocate(bytes);
    }
    if (poison_) {
      fill_with_poison(slot, bytes);
    }
    return slot;
  }

  void release(void* pointer, Bytes bytes) noexcept override {
    if (poison_) {
      // Kernels that have not ended have computed already, and no longer need these bytes.
      fill_with_poison(pointer, bytes);
    }
    if (!keep_) {
      heap_.release(pointer, bytes);
      return;
    }
    const std::lock_guard lock(mutex_);
    kept_[bytes].push_back(pointer);
  }

 private:
  void* take_kept(Bytes bytes) noexcept {
    const std::lock_guard lock(mutex_);
    const auto found = kept_.find(bytes);
    if (found == kept_.end() || found->second.empty()) {
      return nullptr;
    }
    void* const slot = found->second.back();
    found->second.pop_back();
    return slot;
  }

  const bool poison_;
  const bool keep_;
  const std::shared_ptr<FaultInjector> faults_;
  HeapResource heap_;
  std::mutex mutex_;
  std::map<Bytes, std::vector<void*>> kept_;
};

/// Members are destroyed from the last to the first: the lanes drain while the kernels they wait for still run.
struct SimulatedDevice::State {
  State(const SimulatedDeviceOptions& options, ActivityLog& log)
      : slots(options.poison, options.asynchronous, options.faults),
        memory{.content = {},
               .hazards = {},
               .compute = options.asynchronous ? std::make_unique<ComputeLane>(options.kernel_delay_seconds,
                                                                               options.seed, options.faults)
                                               : nullptr},
        to_device({.direction = Direction::kToDevice,
                   .bytes_per_second = options.to_device_bytes_per_second,
                   .latency_seconds = options.latency_seconds,
                   .faults = options.faults},
                  memory, log),
        to_host({.direction = Direction::kToHost,
                 .bytes_per_second = options.to_host_bytes_per_second,
                 .latency_seconds = options.latency_seconds,
                 .faults = options.faults},
                memory, log) {}

  SimulatedSlots slots;
  SimulatedMemory memory;
  SimulatedLane to_device;
  SimulatedLane to_host;
};

SimulatedDevice::SimulatedDevice(SimulatedDeviceOptions options)
    : host_memory_bytes_per_second_(options.host_memory_bytes_per_second),
      state_(std::make_unique<State>(options, activity())) {}

SimulatedDevice::~SimulatedDevice() = default;

Resource& SimulatedDevice::slots() noexcept { return state_->slots; }

Lane& SimulatedDevice::to_device() noexcept { return state_->to_device; }

Lane& SimulatedDevice::to_host() noexcept { return state_->to_host; }

FencePtr SimulatedDevice::record() {
  ComputeLane* const compute = state_->memory.compute.get();
  return compute == nullptr ? nullptr : compute->record();
}

void SimulatedDevice::compute_waits(Ticket& ticket) {
  // The asynchronous mode waits too, because the host computes at once and only pretends to be late.
  ticket.wait();
}

void SimulatedDevice::note_read(const void* pointer, Bytes bytes) {
  SimulatedMemory& memory = state_->memory;
  if (memory.compute == nullptr || bytes == 0) {
    return;
  }
  memory.hazards.compute_reads(pointer, bytes, memory.compute->enqueue({}));
}

void SimulatedDevice::note_write(void* pointer, Bytes bytes) {
  SimulatedMemory& memory = state_->memory;
  if (memory.compute == nullptr || bytes == 0) {
    return;
  }
  const auto size = static_cast<std::size_t>(bytes);
  const auto hidden = std::make_shared<std::vector<char>>(size);
  ComputeLane::Position position = 0;
  {
    // The kernel needs this lock, so it cannot run before the bytes are hidden. No statement after enqueue()
    // throws, so the bytes are not hidden without a kernel that restores them.
    const std::unique_lock lock(memory.content);
    position = memory.compute->enqueue([&memory, pointer, hidden] {
      const std::unique_lock kernel_lock(memory.content);
      std::memcpy(pointer, hidden->data(), hidden->size());
    });
    std::memcpy(hidden->data(), pointer, size);
    fill_with_poison(pointer, bytes);
  }
  memory.hazards.compute_writes(pointer, bytes, position);
}

std::int64_t SimulatedDevice::hazards() const {
  if (state_->memory.compute != nullptr) {
    state_->memory.compute->drain();
  }
  return state_->memory.hazards.count();
}

std::string SimulatedDevice::first_hazard() const {
  if (state_->memory.compute != nullptr) {
    state_->memory.compute->drain();
  }
  return state_->memory.hazards.first();
}

}  // namespace hydra
