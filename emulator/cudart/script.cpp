#include "emulator/cudart/script.h"

namespace emulated_cuda::cudart {

void Script::fail(const std::string& call, cudaError_t error, int successes) {
  const std::lock_guard lock(mutex_);
  failures_.insert_or_assign(call, Failure{.error = error, .successes = successes});
}

void Script::count(std::string_view call) {
  const std::lock_guard lock(mutex_);
  const auto found = calls_.find(call);
  if (found == calls_.end()) {
    calls_.emplace(call, 1);
  } else {
    ++found->second;
  }
}

cudaError_t Script::take_failure(std::string_view call) {
  const std::lock_guard lock(mutex_);
  const auto found = failures_.find(call);
  if (found == failures_.end() || found->second.successes-- > 0) {
    return cudaSuccess;
  }
  const cudaError_t error = found->second.error;
  failures_.erase(found);
  return error;
}

std::int64_t Script::calls(std::string_view call) const {
  const std::lock_guard lock(mutex_);
  const auto found = calls_.find(call);
  return found == calls_.end() ? 0 : found->second;
}

void Script::clear() {
  const std::lock_guard lock(mutex_);
  failures_.clear();
  calls_.clear();
}

}  // namespace emulated_cuda::cudart
