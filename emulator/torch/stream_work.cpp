#include "emulator/torch/stream_work.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <utility>

#include "emulator/cudart/control.h"

// Of the OpenMP runtime and the matrix library that torch brings; no header of theirs is in the wheel.
extern "C" void omp_set_num_threads(int count);
extern "C" int MKL_Set_Num_Threads_Local(int count);

namespace emulated_cuda {

namespace {

struct LatestFault {
  std::mutex mutex;
  std::string message;
};

LatestFault& latest_fault() {
  static LatestFault instance;
  return instance;
}

void settle_thread() {
  thread_local bool settled = false;
  if (!settled) {
    at::get_num_threads();  // torch sets the count at a thread's first loop, and would undo what follows
    omp_set_num_threads(1);
    MKL_Set_Num_Threads_Local(1);
    settled = true;
  }
}

/// The state of torch in which a stream's work runs.
struct TorchState {
  const at::NoGradGuard no_gradients{};
  const at::AutoDispatchBelowADInplaceOrView below_autograd{};
  const at::DisableRecordFunctionGuard no_callbacks{};
};

class WorkScope {
 public:
  WorkScope() { settle_thread(); }

 private:
  const TorchState state_;
};

void fail(c10::DeviceIndex device, const char* message) noexcept {
  {
    LatestFault& latest = latest_fault();
    const std::lock_guard lock(latest.mutex);
    latest.message = message;
  }
  set_fault(device, cudaErrorAssert);
}

cudaStream_t current_stream(c10::DeviceIndex device) { return c10::cuda::getCurrentCUDAStream(device).stream(); }

}  // namespace

void enqueue(c10::DeviceIndex device, std::function<void()> work, const KernelWork& amount) {
  const c10::cuda::CUDAGuard guard(device);
  const auto guarded = [device, work = std::move(work)] {
    try {
      const WorkScope scope;
      work();
    } catch (const c10::Error& error) {
      fail(device, error.what_without_backtrace());
    } catch (const std::exception& error) {
      fail(device, error.what());
    }
  };
  C10_CUDA_CHECK(launch(current_stream(device), guarded, amount));
}

void run_on_this_thread(const std::function<void()>& work) {
  const TorchState state;
  work();
}

void run_now(c10::DeviceIndex device, std::function<void()> work) {
  TORCH_CHECK_NOT_IMPLEMENTED(!clock_runs(), "under the virtual clock nothing is computed");
  const c10::cuda::CUDAGuard guard(device);
  auto promise = std::make_shared<std::promise<void>>();
  std::future<void> ended = promise->get_future();
  C10_CUDA_CHECK(launch(current_stream(device), [promise, work = std::move(work)] {
    try {
      const WorkScope scope;
      work();
      promise->set_value();
    } catch (...) {
      promise->set_exception(std::current_exception());
    }
  }));
  promise.reset();  // the stream's is the last one: a failed device drops it
  try {
    ended.get();
  } catch (const std::future_error&) {
    C10_CUDA_CHECK(cudaStreamSynchronize(current_stream(device)));
    throw;
  }
}

std::string fault_message() {
  LatestFault& latest = latest_fault();
  const std::lock_guard lock(latest.mutex);
  return latest.message;
}

void forget_fault() {
  LatestFault& latest = latest_fault();
  const std::lock_guard lock(latest.mutex);
  latest.message.clear();
}

}  // namespace emulated_cuda
