// Slots from cudaMalloc, kept for immediate reuse, as in torch's allocator.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "csrc/transfer/cuda/cuda_device.h"
#include "csrc/transfer/cuda/cuda_error.h"

namespace hydra::test {

class CudaTestSlots final : public Resource {
 public:
  CudaTestSlots() = default;
  ~CudaTestSlots() override {
    for (const auto& [bytes, slots] : kept_) {
      for (void* const slot : slots) {
        forget_cuda_error(cudaFree(slot));
      }
    }
  }

  void* allocate(Bytes bytes) override {
    const std::lock_guard lock(mutex_);
    std::vector<void*>& kept = kept_[bytes];
    if (!kept.empty()) {
      void* const slot = kept.back();
      kept.pop_back();
      return slot;
    }
    void* slot = nullptr;
    check_cuda(cudaMalloc(&slot, static_cast<std::size_t>(bytes)), "cudaMalloc", bytes);
    return slot;
  }

  void release(void* pointer, Bytes bytes) noexcept override {
    const std::lock_guard lock(mutex_);
    kept_[bytes].push_back(pointer);
  }

 private:
  std::mutex mutex_;
  std::map<Bytes, std::vector<void*>> kept_;
};

/// The calling thread's compute stream; the default stream unless set.
inline thread_local cudaStream_t compute_stream = nullptr;

inline std::unique_ptr<CudaDevice> make_cuda_device(int device = 0, cudaStream_t home = nullptr) {
  return std::make_unique<CudaDevice>(device, home, [] { return compute_stream; }, std::make_unique<CudaTestSlots>());
}

}  // namespace hydra::test
