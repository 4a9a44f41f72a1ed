// The simulated device's budget, to the byte: a CPU allocator that charges tensors' allocations to an account.
//
// It wraps the allocator in place and returns that allocator's own pointers. Sizes are in a side table, since a header
// before the data breaks libraries that allocate raw memory. It is installed when the first thread is charged, and
// never removed; without a charge it passes every call through.
//
// A charge belongs to a thread, not to its children after a fork. A worker of a parallel region without a charge of its
// own uses the account that was given to any thread last. HostScope suspends charging on a thread, for host copies of
// gradients. hydra_ext/runtime/placement/exempt.py lists the memory that the allocator cannot see. Thread-safe.
#pragma once

#include "csrc/pytorch/memory/account.h"

namespace hydra {

/// The account of a thread's allocations. Without an account, or with a closed one, allocations are not charged.
struct ThreadCharge {
  AccountPtr account;
  /// Whether the charge ends when `graph` dies: the results of a forward, whose backward may follow or not.
  bool while_graph_lives = false;
  std::weak_ptr<const void> graph{};
};

/// Sets the calling thread's charge and returns the former one.
ThreadCharge exchange_thread_charge(ThreadCharge charge);
/// Returns the account that the calling thread's allocations are charged to now, or null.
AccountPtr current_account();

class HostScope {
 public:
  HostScope() noexcept;
  ~HostScope();
  HostScope(const HostScope&) = delete;
  HostScope& operator=(const HostScope&) = delete;
};

/// Installs the allocator. Throws StateError if the allocator in place cannot be wrapped.
void install_counting_allocator();

/// Moves a charged allocation to another class. Returns false if `pointer` is not a charged allocation.
bool reclassify(const void* pointer, MemoryClass cls);
/// Whether `pointer` is a live allocation that is charged to an account.
bool is_charged(const void* pointer);

}  // namespace hydra
