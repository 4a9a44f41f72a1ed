#include "csrc/pytorch/parameters/window_gate.h"

#include "csrc/base/errors.h"
#include "csrc/pytorch/threads/gil.h"

namespace hydra {

std::unique_lock<std::mutex> WindowGate::hold() { return lock_without_gil(mutex_); }

void WindowGate::expect_outside(const char* message) const { HYDRA_EXPECT(!closed() && !open(), StateError, message); }

}  // namespace hydra
