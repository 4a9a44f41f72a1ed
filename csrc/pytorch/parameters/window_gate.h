// The gate of one model's windows: whether a thread is inside, whether the context has ended, and the lock under which
// windows open and close.
//
// Owns the swap of dictionaries. All parts of a model ask here before they change what a pass relies on.
// Threads: any. The lock is held while an edge waits for lanes, so that it is never waited for with the interpreter
// lock held.
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

  /// What modules show, and which threads are inside.
  Window& swap() noexcept { return swap_; }
  /// Whether some thread is inside.
  bool open() const { return swap_.depths().total > 0; }
  bool closed() const noexcept { return closed_; }
  /// The context ends. False if it had ended before.
  bool close() noexcept { return !closed_.exchange(true); }
  /// While the result lives, no window opens or closes.
  std::unique_lock<std::mutex> hold();
  /// Throws StateError with this message if some thread is inside, or the context has ended.
  void expect_outside(const char* message) const;

 private:
  Window swap_;
  std::mutex mutex_;
  std::atomic<bool> closed_{false};
};

}  // namespace hydra
