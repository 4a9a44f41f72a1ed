#include "emulator/torch/nccl_work.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <utility>

namespace emulated_cuda {

namespace {

constexpr std::chrono::milliseconds kLook{10};  // between two looks for an abort and a failed device

}  // namespace

void NcclProgress::end(const std::string& error) {
  const std::lock_guard lock(mutex_);
  ended_ = true;
  error_ = error;
  changed_.notify_all();
}

bool NcclProgress::ended() const {
  const std::lock_guard lock(mutex_);
  return ended_;
}

std::string NcclProgress::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

void NcclProgress::wait_for(std::chrono::milliseconds time) const {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, time, [this] { return ended_; });
}

NcclWork::NcclWork(int rank, c10d::OpType type, Parts parts) : Work(rank, type), parts_(std::move(parts)) {}

std::string NcclWork::error() const {
  if (std::string own = parts_.progress->error(); !own.empty()) {
    return own;
  }
  return parts_.progress->ended() ? "" : parts_.communicator->error();
}

bool NcclWork::isCompleted() {
  const c10::cuda::CUDAGuard guard(parts_.device);
  return !error().empty() || parts_.end->query();
}

bool NcclWork::isSuccess() const { return error().empty(); }

std::exception_ptr NcclWork::exception() const {
  const std::string text = error();
  return text.empty() ? nullptr : std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, text));
}

std::vector<at::Tensor> NcclWork::result() { return parts_.outputs; }

void NcclWork::synchronize() {
  const c10::cuda::CUDAGuard guard(parts_.device);
  parts_.end->block(c10::cuda::getCurrentCUDAStream(parts_.device.index()));
  release_tensors();
}

void NcclWork::release_tensors() {
  std::vector<at::Tensor> dropped;
  const std::lock_guard lock(tensors_);
  dropped.swap(parts_.used);
}

bool NcclWork::wait(std::chrono::milliseconds timeout) {
  synchronize();
  if (timeout != kNoTimeout || parts_.blocks_host) {
    block_host(timeout);
  }
  if (const std::string text = error(); !text.empty()) {
    C10_THROW_ERROR(DistBackendError, text);
  }
  return true;
}

void NcclWork::block_host(std::chrono::milliseconds timeout) {
  const nccl::Clock::time_point begin = nccl::Clock::now();
  while (!isCompleted()) {
    if (timeout != kNoTimeout && nccl::Clock::now() - begin > timeout) {
      parts_.communicator->abort();
      C10_THROW_ERROR(DistBackendError,
                      "an operation of NCCL has timed out after " + std::to_string(timeout.count()) + " ms");
    }
    parts_.progress->wait_for(kLook);
  }
}

void NcclWork::abort() { parts_.communicator->abort(); }

}  // namespace emulated_cuda
