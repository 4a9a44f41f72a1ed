#include "emulator/torch/workspaces.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <regex>
#include <string>
#include <utility>
#include <vector>

namespace emulated_cuda {

namespace {

constexpr std::size_t kKiB = 1024;

/// The workspaces, and the handles that no thread has. Never destroyed: threads may end after the program's statics.
struct Library {
  struct Workspace {
    c10::DataPtr memory;
    std::size_t bytes = 0;
  };

  std::mutex mutex;
  std::map<c10::DeviceIndex, std::vector<int>> free_handles;
  std::map<std::pair<int, cudaStream_t>, Workspace> workspaces;
  int handles = 0;
  std::atomic<std::ptrdiff_t> asked_bytes{-1};  // negative: as the environment says
};

Library& library() {
  static auto* const instance = std::make_unique<Library>().release();
  return *instance;
}

/// The handles of one thread.
class ThreadHandles {
 public:
  ThreadHandles() = default;
  ThreadHandles(const ThreadHandles&) = delete;
  ThreadHandles& operator=(const ThreadHandles&) = delete;
  ~ThreadHandles() {
    Library& known = library();
    const std::lock_guard lock(known.mutex);
    for (const auto& [device, handle] : handles_) {
      known.free_handles[device].push_back(handle);
    }
  }

  int of(c10::DeviceIndex device) {
    const auto own = handles_.find(device);
    if (own != handles_.end()) {
      return own->second;
    }
    Library& known = library();
    const std::lock_guard lock(known.mutex);
    std::vector<int>& free = known.free_handles[device];
    if (free.empty()) {
      free.push_back(known.handles++);
    }
    handles_[device] = free.back();
    free.pop_back();
    return handles_[device];
  }

 private:
  std::map<c10::DeviceIndex, int> handles_;
};

/// The sum of all `:SIZE:COUNT` in a text, with sizes in KiB; none if there are none.
std::optional<std::size_t> parse(const std::string& text) {
  static const std::regex pair(":([0-9]+):([0-9]+)");
  std::optional<std::size_t> sum;
  for (std::sregex_iterator found(text.begin(), text.end(), pair), end; found != end; ++found) {
    sum = sum.value_or(0) + std::stoull(found->str(1)) * kKiB * std::stoull(found->str(2));
  }
  return sum;
}

std::size_t usual_bytes() {
  cudaDeviceProp card{};
  int device = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaGetDeviceProperties(&card, device));
  const bool hopper = card.major == 9 && card.minor == 0;
  const std::size_t by_card = hopper ? 4096 * kKiB * 8 : 4096 * kKiB * 2 + 16 * kKiB * 8;
  const char* const config = std::getenv("CUBLAS_WORKSPACE_CONFIG");
  return config == nullptr ? by_card : parse(config).value_or(by_card);
}

}  // namespace

void take_workspace(c10::DeviceIndex device) {
  thread_local ThreadHandles handles;
  const std::size_t bytes = workspace_bytes();
  const std::pair key{handles.of(device), c10::cuda::getCurrentCUDAStream(device).stream()};
  Library& known = library();
  {
    const std::lock_guard lock(known.mutex);
    const auto found = known.workspaces.find(key);
    if (found != known.workspaces.end() && found->second.bytes >= bytes) {
      return;
    }
  }
  Library::Workspace made{c10::cuda::CUDACachingAllocator::get()->allocate(bytes), bytes};  // outside the lock
  const std::lock_guard lock(known.mutex);
  std::swap(known.workspaces[key], made);
}

void clear_workspaces() {
  Library& known = library();
  const std::lock_guard lock(known.mutex);
  known.workspaces.clear();
}

std::size_t workspace_bytes() {
  const std::ptrdiff_t asked = library().asked_bytes;
  static const std::size_t usual = usual_bytes();
  return asked < 0 ? usual : static_cast<std::size_t>(asked);
}

void set_workspace_bytes(std::size_t bytes) { library().asked_bytes = static_cast<std::ptrdiff_t>(bytes); }

void reset_workspace_bytes() { library().asked_bytes = -1; }

}  // namespace emulated_cuda
