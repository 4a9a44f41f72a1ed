// Work on the host's memory that a process which emulates a machine takes over: optimizer steps, norms and sums of
// gradients, first touches of pages and moves of parameters.
//
// The taker accounts for the bytes, and returns when the work would have ended; the work is not done. Without a taker,
// which is so in every training, all work is done. Set before any work begins. Thread-safe.
#pragma once

#include "csrc/base/types.h"

namespace hydra {

using HostWorkTaker = void (*)(Bytes bytes) noexcept;

/// Hands work of so many bytes over. Returns false if the caller has to do it.
bool host_work_taken(Bytes bytes) noexcept;

}  // namespace hydra

/// Sets the taker of this process; null ends that. By its name, so that an emulation needs no binding.
extern "C" __attribute__((visibility("default"))) void hydra_take_host_work(hydra::HostWorkTaker taker) noexcept;
