#include "csrc/pytorch/thread_context.h"

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>

#include <thread>

#include "csrc/pytorch/gil.h"

namespace hydra {

namespace {

int autocast_depth() {
  at::autocast::increment_nesting();
  return at::autocast::decrement_nesting();
}

/// The numbers of threads of OpenMP and of MKL, which sum in an order of their own for each.
void use_threads(int wanted) {
  // Torch gives a thread its numbers when it first asks for them, which many operators, those of FFTs among them, never
  // do: they would run with as many threads as the machine has.
  const int given = at::get_num_threads();
  if (given == wanted) {
    return;
  }
  at::set_num_threads(wanted);
  // That is also what threads of the future are given. Another thread puts back what it was, without ours losing its.
  const ReleaseGilIfHeld released;
  std::thread([given] { at::set_num_threads(given); }).join();
}

}  // namespace

ThreadContext::ThreadContext() : autocast_depth_(autocast_depth()), threads_(at::get_num_threads()) {}

void ThreadContext::enter() const {
  at::ThreadLocalState::setThreadLocalState(state_);
  use_threads(threads_);
  // Not part of torch's own state. Leaving the outermost region clears the process's cache, so that a region inside
  // another one has to know that it is inside.
  for (int depth = autocast_depth(); depth < autocast_depth_; ++depth) {
    at::autocast::increment_nesting();
  }
  at::autocast::set_autocast_cache_enabled(false);
}

}  // namespace hydra
