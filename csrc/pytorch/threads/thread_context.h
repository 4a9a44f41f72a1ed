// Carries torch's per-thread state from one thread to another.
//
// The thread that calls run.step() captures the state, and the thread of each microbatch enters it: grad and inference
// mode, autocast, dispatch and function modes, saved-tensor hooks, profilers. Autocast has one cache of cast weights
// for the process. Threads that take turns would share the casts' graph nodes, so enter() switches the cache off.
// The thread also becomes one of the captured thread's tenant on a shared device.
// Threads: any; several threads may enter one object.
#pragma once

#include <ATen/ThreadLocalState.h>

#include "csrc/base/device_turns.h"

namespace hydra {

class ThreadContext {
 public:
  /// Captures the calling thread's state.
  ThreadContext();
  /// Gives the state to the calling thread, and never restores the former one: for threads that end soon.
  void enter() const;

 private:
  at::ThreadLocalState state_;
  int autocast_depth_;
  DeviceTurns::Seat seat_;
};

}  // namespace hydra
