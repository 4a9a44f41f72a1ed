// Fibers: contexts that one thread switches between, each with a stack of its own.
//
// A fiber runs until it switches to another. All belong to one thread. AddressSanitizer is told of each switch. The
// floating-point mode is the thread's, and not switched. Fibers that are left for good are forgotten, not unwound.
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulated_cuda::kernels {

struct Stack {
  std::byte* begin = nullptr;
  std::size_t bytes = 0;
};

/// Memory for the stacks of a thread's fibers. Below each lies a page that ends the process when it is touched.
class Stacks {
 public:
  Stacks() = default;
  ~Stacks() { release(); }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  /// Makes room for so many. None may be in use. Throws std::bad_alloc.
  void reserve(std::size_t count);
  Stack at(std::size_t index) const noexcept;

 private:
  void release() noexcept;

  std::byte* begin_ = nullptr;
  std::size_t count_ = 0;
};

class Fiber {
 public:
  using Entry = void (*)();

  /// Until prepare() this is the context of the thread that made it.
  Fiber() = default;
  /// The next switch to it calls `entry`, which never returns and lets no exception out.
  void prepare(const Stack& stack, Entry entry) noexcept;
  /// Goes on in `next`, which must not be this fiber. Returns when another switches back.
  void switch_to(Fiber& next) noexcept;
  /// Goes on in `next`, and never comes back.
  [[noreturn]] void leave_for(Fiber& next) noexcept;

 private:
  static void enter();
  void hand_over(Fiber& next, bool for_good) noexcept;

#if defined(__x86_64__)
  void* saved_ = nullptr;  // the stack pointer
#else
  ucontext_t saved_{};
#endif
  Entry entry_ = nullptr;
  Stack stack_;
  void* fake_stack_ = nullptr;  // of AddressSanitizer
};

}  // namespace emulated_cuda::kernels
