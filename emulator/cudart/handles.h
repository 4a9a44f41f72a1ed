// Handles of streams and events: numbers that are never given twice, so a handle that was destroyed is known to be
// wrong. Owns the objects together with the callers that use them. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace emulated_cuda::cudart {

/// A handle that no object has yet. Multiples of 64, as addresses of objects would be.
inline std::uintptr_t new_handle() noexcept {
  static std::atomic<std::uintptr_t> last{std::uintptr_t{1} << 20};
  return last += 64;
}

template <class Handle, class Object>
class Handles {
 public:
  Handle add(std::shared_ptr<Object> object) {
    const auto handle = reinterpret_cast<Handle>(new_handle());
    const std::lock_guard lock(mutex_);
    objects_.emplace(handle, std::move(object));
    ++size_;
    return handle;
  }
  /// Null if there is no such object.
  std::shared_ptr<Object> find(Handle handle) const {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(handle);
    return found == objects_.end() ? nullptr : found->second;
  }
  std::shared_ptr<Object> remove(Handle handle) {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(handle);
    if (found == objects_.end()) {
      return nullptr;
    }
    std::shared_ptr<Object> object = std::move(found->second);
    objects_.erase(found);
    --size_;
    return object;
  }
  std::vector<std::shared_ptr<Object>> all() const {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Object>> found;
    for (const auto& [handle, object] : objects_) {
      found.push_back(object);
    }
    return found;
  }
  int size() const noexcept { return size_; }

 private:
  mutable std::mutex mutex_;
  std::map<Handle, std::shared_ptr<Object>> objects_;
  std::atomic<int> size_{0};
};

}  // namespace emulated_cuda::cudart
