// Work on the current stream of a device, as functions that use the CPU's operators.
//
// On the stream's thread such a function finds gradients, autograd's and autocast's dispatch keys and callbacks of
// operators switched off, whatever the calling thread has set, and one thread for the loops of operators: helper
// threads of a loop would not hold the key of device memory. A function owns all it needs; it must not hold device
// storages, whose memory a device frees and reuses in the stream's order. Thread-safe. No call takes Python's lock.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <string>

#include "emulator/cudart/control.h"

namespace emulated_cuda {

/// Runs later. An exception is a fault of the device, cudaErrorAssert. Throws torch's error of a failed device.
void enqueue(c10::DeviceIndex device, std::function<void()> work, const KernelWork& amount = {});

/// Runs at once, on the calling thread, which needs no device memory for it.
void run_on_this_thread(const std::function<void()>& work);

/// Runs in the stream's turn, and waits for it. An exception is thrown to the caller.
void run_now(c10::DeviceIndex device, std::function<void()> work);

/// The message of the latest exception that became a fault; empty if there was none since `forget_fault`.
std::string fault_message();
void forget_fault();

}  // namespace emulated_cuda
