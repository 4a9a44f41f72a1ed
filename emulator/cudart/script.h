// What tests say about single calls: failures to come, and how often a call was made. Thread-safe.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

namespace emulated_cuda::cudart {

class Script {
 public:
  void fail(const std::string& call, cudaError_t error, int successes);
  void count(std::string_view call);
  /// The failure of this call, if it is due now.
  cudaError_t take_failure(std::string_view call);
  std::int64_t calls(std::string_view call) const;
  void clear();

 private:
  struct Failure {
    cudaError_t error = cudaSuccess;
    int successes = 0;  // before it
  };

  mutable std::mutex mutex_;
  std::map<std::string, Failure, std::less<>> failures_;
  std::map<std::string, std::int64_t, std::less<>> calls_;
};

}  // namespace emulated_cuda::cudart
