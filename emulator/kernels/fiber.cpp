#include "emulator/kernels/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__SANITIZE_THREAD__)
#error "ThreadSanitizer sees the threads of a block only with thread_executor.cpp"
#endif

#if defined(__x86_64__)
// Saves the registers that a call preserves, keeps the stack pointer at *saved, and goes on where `next` was kept.
// swapcontext() would do, with a system call each time: a hundred times slower.
extern "C" void emulated_cuda_switch_stacks(void** saved, void* next) noexcept;
asm(R"(
  .pushsection .text
  .hidden emulated_cuda_switch_stacks
  .globl emulated_cuda_switch_stacks
  .type emulated_cuda_switch_stacks, @function
emulated_cuda_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size emulated_cuda_switch_stacks, .-emulated_cuda_switch_stacks
  .popsection
)");
#endif

namespace emulated_cuda::kernels {

namespace {

constexpr std::size_t kStackBytes = std::size_t{128} << 10;

thread_local Fiber* t_left = nullptr;  // by the latest switch
thread_local Fiber* t_running = nullptr;

std::size_t page_bytes() noexcept {
  static const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace

// ---- stacks ---------------------------------------------------------------------------------------------------------

void Stacks::reserve(std::size_t count) {
  if (count <= count_) {
    return;
  }
  release();
  void* const begin = ::mmap(nullptr, count * kStackBytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (begin == MAP_FAILED) {
    throw std::bad_alloc();
  }
  begin_ = static_cast<std::byte*>(begin);
  count_ = count;
  for (std::size_t index = 0; index < count; ++index) {
    ::mprotect(begin_ + index * kStackBytes, page_bytes(), PROT_NONE);
  }
}

Stack Stacks::at(std::size_t index) const noexcept {
  return {begin_ + index * kStackBytes + page_bytes(), kStackBytes - page_bytes()};
}

void Stacks::release() noexcept {
  if (begin_ != nullptr) {
    ::munmap(begin_, count_ * kStackBytes);
    begin_ = nullptr;
    count_ = 0;
  }
}

// ---- switches -------------------------------------------------------------------------------------------------------

#if defined(__x86_64__)

void Fiber::prepare(const Stack& stack, Entry entry) noexcept {
  constexpr int kSavedRegisters = 6;
  stack_ = stack;
  entry_ = entry;
  auto** top = reinterpret_cast<void**>(stack.begin + stack.bytes);
  *--top = nullptr;  // the return address of enter(), which never returns
  *--top = reinterpret_cast<void*>(&Fiber::enter);
  for (int saved = 0; saved < kSavedRegisters; ++saved) {
    *--top = nullptr;
  }
  saved_ = top;
}

#else

void Fiber::prepare(const Stack& stack, Entry entry) noexcept {
  stack_ = stack;
  entry_ = entry;
  ::getcontext(&saved_);
  saved_.uc_stack.ss_sp = stack.begin;
  saved_.uc_stack.ss_size = stack.bytes;
  ::makecontext(&saved_, &Fiber::enter, 0);
}

#endif

// AddressSanitizer leaves these two alone: a fiber that never comes back would leave poison on its stack.
#define EMULATED_CUDA_UNSANITIZED __attribute__((no_sanitize("address"), noinline))

EMULATED_CUDA_UNSANITIZED void Fiber::enter() {
#if defined(__SANITIZE_ADDRESS__)
  const void* begin = nullptr;
  std::size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &begin, &bytes);
  t_left->stack_ = {static_cast<std::byte*>(const_cast<void*>(begin)), bytes};  // the thread's own is not known before
#endif
  t_running->entry_();
}

EMULATED_CUDA_UNSANITIZED void Fiber::hand_over(Fiber& next, [[maybe_unused]] bool for_good) noexcept {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fake_stack_, next.stack_.begin, next.stack_.bytes);
#endif
  t_left = this;
  t_running = &next;
#if defined(__x86_64__)
  emulated_cuda_switch_stacks(&saved_, next.saved_);
#else
  ::swapcontext(&saved_, &next.saved_);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
}

void Fiber::switch_to(Fiber& next) noexcept { hand_over(next, false); }

void Fiber::leave_for(Fiber& next) noexcept {
  hand_over(next, true);
  __builtin_unreachable();
}

}  // namespace emulated_cuda::kernels
