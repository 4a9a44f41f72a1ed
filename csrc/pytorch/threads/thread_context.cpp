#include "csrc/pytorch/threads/thread_context.h"

#include <ATen/autocast_mode.h>

namespace hydra {

namespace {

int autocast_depth() {
  at::autocast::increment_nesting();
  return at::autocast::decrement_nesting();
}

}  // namespace

ThreadContext::ThreadContext() : autocast_depth_(autocast_depth()) {}

void ThreadContext::enter() const {
  at::ThreadLocalState::setThreadLocalState(state_);
  // Not part of torch's own state. Leaving the outermost region clears the process's cache, so that a region inside
  // another one has to know that it is inside.
  for (int depth = autocast_depth(); depth < autocast_depth_; ++depth) {
    at::autocast::increment_nesting();
  }
  at::autocast::set_autocast_cache_enabled(false);
}

}  // namespace hydra
