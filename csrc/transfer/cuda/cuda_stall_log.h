// Stalls of a stream, each from an event before the wait to one behind it.
//
// The first event is reached when all earlier work has ended, and the second one when later work may begin. Between two
// events with nothing between them a stream stands still. Owns its events. Thread-safe; its mutex is taken last.
#pragma once

#include <deque>
#include <functional>
#include <mutex>

#include "csrc/transfer/cuda/cuda_event.h"
#include "csrc/transfer/stall_log.h"

namespace hydra {

class CudaStallLog final : public StallLog {
 public:
  CudaStallLog(int device, std::function<cudaStream_t()> current_stream);

  void start() override;
  void stop() noexcept override;
  std::int64_t count() const noexcept override;
  double seconds(std::int64_t first, std::int64_t end) override;

 private:
  struct Pair {
    CudaEventPtr begin;
    CudaEventPtr end;
  };

  bool begin() noexcept override;
  void end() noexcept override;
  CudaEventPtr marked() noexcept;
  void fold_locked(bool wait);

  const int device_;
  const std::function<cudaStream_t()> current_stream_;
  CudaEventPool events_;
  std::atomic<bool> on_{false};

  mutable std::mutex mutex_;
  int depth_ = 0;
  CudaEventPtr begin_;              // of the outermost stall
  std::vector<double> until_{0.0};  // seconds of the stalls up to each
  std::deque<Pair> pending_;        // stalls behind these
};

}  // namespace hydra
