// Two means to block without the interpreter lock: a scope that releases it, and a lock that never waits with it.
#pragma once

#include <Python.h>

#include <mutex>

namespace hydra {

/// Releases the interpreter lock for its lifetime if the calling thread holds it. Every wait for a lane needs it:
/// a lane may have to drop a tensor that Python has seen, and takes the lock for it.
class ReleaseGilIfHeld {
 public:
  ReleaseGilIfHeld() noexcept : saved_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~ReleaseGilIfHeld() {
    if (saved_ != nullptr) {
      PyEval_RestoreThread(saved_);
    }
  }
  ReleaseGilIfHeld(const ReleaseGilIfHeld&) = delete;
  ReleaseGilIfHeld& operator=(const ReleaseGilIfHeld&) = delete;

 private:
  PyThreadState* saved_;
};

/// Locks a mutex whose holder may need the interpreter lock. Never waits for the mutex while it has that lock.
inline std::unique_lock<std::mutex> lock_without_gil(std::mutex& mutex) {
  std::unique_lock lock(mutex, std::try_to_lock);
  if (!lock) {
    const ReleaseGilIfHeld released;
    lock.lock();
  }
  return lock;
}

}  // namespace hydra
