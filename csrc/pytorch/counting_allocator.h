// The simulated device's budget, to the byte: a CPU allocator that charges what tensors allocate.
//
// It stands in front of the allocator that was there and hands out that allocator's own pointers; sizes are
// kept in a side table, since a header before the data breaks libraries that allocate raw. Installed once,
// when the first account opens a scope, and never removed: without a scope it passes every call through.
//
// A scope belongs to a thread. A worker of a parallel region that has no scope of its own charges to the
// account whose scope was opened last. HostScope suspends charging on a thread: for host copies of gradients.
// What cannot be seen is listed in hydra_ext/runtime/exempt.py.
#pragma once

#include "csrc/pytorch/account.h"

namespace hydra {

/// Sets the calling thread's account (null: none) and returns the one it replaces.
AccountPtr exchange_thread_account(AccountPtr account);
/// The account the calling thread's allocations are charged to now; null when none.
AccountPtr current_account();

class HostScope {
 public:
  HostScope() noexcept;
  ~HostScope();
  HostScope(const HostScope&) = delete;
  HostScope& operator=(const HostScope&) = delete;
};

/// Installs the allocator. Throws StateError when the allocator in place cannot be wrapped.
void install_counting_allocator();

/// Moves a charged allocation to another class. False when `pointer` is not a charged allocation.
bool reclassify(const void* pointer, MemoryClass cls);
/// Whether `pointer` is a live allocation charged to some account.
bool is_charged(const void* pointer);

}  // namespace hydra
