#include "csrc/base/host_work.h"

#include <atomic>

namespace hydra {

namespace {

std::atomic<HostWorkTaker> g_taker{nullptr};

}  // namespace

bool host_work_taken(Bytes bytes) noexcept {
  const HostWorkTaker taker = g_taker.load(std::memory_order_relaxed);
  if (taker == nullptr) {
    return false;
  }
  taker(bytes);
  return true;
}

}  // namespace hydra

void hydra_take_host_work(hydra::HostWorkTaker taker) noexcept { hydra::g_taker = taker; }
