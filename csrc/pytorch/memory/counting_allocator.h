// The simulated device's budget, to the byte: a CPU allocator that charges what tensors allocate.
//
// It stands in front of the allocator that was there and hands out that allocator's own pointers; sizes are
// kept in a side table, since a header before the data breaks libraries that allocate raw. Installed once,
// when the first thread is charged, and never removed: without a charge it passes every call through.
//
// A charge belongs to a thread, not to its children after a fork. A worker of a parallel region that has none of its
// own charges to the account that a thread was given last. HostScope suspends charging on a thread: for host copies of
// gradients. What cannot be seen is listed in hydra_ext/runtime/placement/exempt.py.
#pragma once

#include "csrc/pytorch/memory/account.h"

namespace hydra {

/// What a thread's allocations are charged to; nothing without an account, nor when the account is closed.
struct ThreadCharge {
  AccountPtr account;
  /// It ends with the life of `graph`: a forward's results, whose backward may come or not.
  bool while_graph_lives = false;
  std::weak_ptr<const void> graph{};
};

/// Sets what the calling thread is charged to and returns what that replaces.
ThreadCharge exchange_thread_charge(ThreadCharge charge);
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
