// What torch keeps per thread, carried from one thread to another.
//
// Captured in the thread that calls run.step(), entered by the thread of each microbatch: grad and inference mode,
// autocast, dispatch and function modes, saved-tensor hooks, profilers. Autocast's cache of cast weights is one for
// the process; threads that take turns would share the casts' graph nodes, so it is off where a context was entered.
// Threads: capture and enter() from any thread; an object may be entered by several.
#pragma once

#include <ATen/ThreadLocalState.h>

namespace hydra {

class ThreadContext {
 public:
  /// Captures the calling thread's state.
  ThreadContext();
  /// Makes it the calling thread's, for good: meant for threads that end soon.
  void enter() const;

 private:
  at::ThreadLocalState state_;
  int autocast_depth_;
};

}  // namespace hydra
