#include "csrc/pytorch/threads/thread_context.h"

#include <ATen/autocast_mode.h>

namespace hydra {

namespace {

int autocast_depth() {
  at::autocast::increment_nesting();
  return at::autocast::decrement_nesting();
}

}  // namespace

ThreadContext::ThreadContext() : autocast_depth_(autocast_depth()), seat_(DeviceTurns::seat()) {}

void ThreadContext::enter() const {
  at::ThreadLocalState::setThreadLocalState(state_);
  // torch's own state lacks the depth. Leaving the outermost region clears the process's cache, so a nested region has
  // to know that it is nested.
  for (int depth = autocast_depth(); depth < autocast_depth_; ++depth) {
    at::autocast::increment_nesting();
  }
  at::autocast::set_autocast_cache_enabled(false);
  DeviceTurns::take_over(seat_);
}

}  // namespace hydra
