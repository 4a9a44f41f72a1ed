// The gate of one model's windows. It tells whether a thread is inside and whether the context has ended, and has the
// lock under which windows open and close.
//
// Owns the swap of dictionaries. All parts of a model check the gate before they change anything that a pass relies on.
// Threads: any. A thread may hold the lock while it waits for lanes at an edge, so no thread waits for it with the
// interpreter lock held.
#pragma once

#include <atomic>
#include <mutex>

#include "csrc/pytorch/parameters/window.h"

namespace hydra {

class WindowGate {
 public:
  WindowGate() = default;
  WindowGate(const WindowGate&) = delete;
  WindowGate& operator=(const WindowGate&) = delete;

  /// The swap of the modules' dictionaries, which also counts the threads inside.
  Window& swap() noexcept { return swap_; }
  /// Whether a thread is inside.
  bool open() const { return swap_.depths().total > 0; }
  bool closed() const noexcept { return closed_; }
  /// Ends the context. Returns false if it had ended before.
  bool close() noexcept { return !closed_.exchange(true); }
  /// Takes the lock: while the result lives, no window opens or closes.
  std::unique_lock<std::mutex> hold();
  /// Throws StateError with this message if a thread is inside, or the context has ended.
  void expect_outside(const char* message) const;

 private:
  Window swap_;
  std::mutex mutex_;
  std::atomic<bool> closed_{false};
};

}  // namespace hydra
