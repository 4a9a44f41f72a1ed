#include "csrc/transfer/device_backend.h"

#include <exception>

namespace hydra {

void DeviceBackend::compute_follows(const FencePtr& fence) {
  if (fence != nullptr) {
    fence->wait();
  }
}

void DeviceBackend::slot_returns(Ticket* ticket, const std::vector<FencePtr>& /*fences*/) noexcept {
  if (ticket == nullptr) {
    return;
  }
  try {
    compute_waits(*ticket);
  } catch (const std::exception&) {
    // A failed fill no longer writes, so the memory may be released.
    ticket->wait_quietly();
  }
}

}  // namespace hydra
