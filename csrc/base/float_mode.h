// The standard floating-point mode for a scope: the thread rounds to nearest and keeps denormal numbers.
//
// torch.set_flush_denormal() and libraries change the mode of single threads; results must not depend on the thread.
// The destructor restores the former mode, and must run on the thread of the constructor.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace hydra {

class StandardFloatMode {
 public:
#if defined(__x86_64__)
  StandardFloatMode() noexcept : before_(_mm_getcsr()) { _mm_setcsr(kStandard); }
  ~StandardFloatMode() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned kStandard = 0x1F80;  // all exceptions masked
  unsigned before_;
#else
  StandardFloatMode() noexcept {}
  ~StandardFloatMode() {}

 private:
#endif
  StandardFloatMode(const StandardFloatMode&) = delete;
  StandardFloatMode& operator=(const StandardFloatMode&) = delete;
};

}  // namespace hydra
