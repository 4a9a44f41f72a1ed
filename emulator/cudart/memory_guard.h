// The addresses of all devices, the protection key of their memory, and the names of its bytes.
//
// A thread without the key that touches device memory gets SIGSEGV. The handler writes one line, and leaves the signal
// to the handler that was there before. It is installed with the first device's addresses, and stays. Without
// protection keys all works, unguarded. The state lives as long as the process. Thread-safe; the handler takes no lock
// that it might wait for. Sizes are bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace emulated_cuda::cudart {

inline constexpr int kMostDevices = 16;
/// The addresses of one device: many times its memory, because expandable segments reserve more than they use.
inline constexpr std::size_t kDeviceAddresses = std::size_t{1} << 40;

inline std::uintptr_t address_of(const void* pointer) noexcept { return reinterpret_cast<std::uintptr_t>(pointer); }

/// The key, or -1 if the machine has none.
int protection_key() noexcept;
/// Gives the calling thread the key or takes it away. Returns whether it had the key before.
bool hold_key(bool hold) noexcept;

/// Reserves the addresses of a device, without memory, for the life of the process. A forked child does not have them.
/// Throws std::bad_alloc.
std::uintptr_t reserve_device(int device);
/// The device at an address, or -1.
int device_at(std::uintptr_t address) noexcept;

/// Names bytes; an empty name takes names away. Names that lay there before are cut.
void name_bytes(std::uintptr_t begin, std::size_t bytes, const std::string& name);

}  // namespace emulated_cuda::cudart
