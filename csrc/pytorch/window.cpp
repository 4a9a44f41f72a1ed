#include "csrc/pytorch/window.h"

#include <algorithm>

namespace py = pybind11;

namespace hydra {

Window::~Window() = default;

void Window::add(py::dict dictionary, py::str key, py::object host, py::object device) {
  entries_.push_back({std::move(dictionary), std::move(key), std::move(host), std::move(device)});
}

void Window::watch(py::dict dictionary, std::string name) {
  const Py_ssize_t size = PyDict_Size(dictionary.ptr());
  watched_.push_back({std::move(dictionary), std::move(name), size});
}

Window::Depths Window::depths() const {
  const std::lock_guard lock(mutex_);
  const auto found = thread_depths_.find(std::this_thread::get_id());
  return {found == thread_depths_.end() ? 0 : found->second, total_};
}

Window::Depths Window::enter() {
  const std::lock_guard lock(mutex_);
  std::int64_t& depth = thread_depths_[std::this_thread::get_id()];
  return {depth++, total_++};
}

bool Window::exit_to(std::int64_t thread_depth) {
  const std::lock_guard lock(mutex_);
  const auto found = thread_depths_.find(std::this_thread::get_id());
  if (found == thread_depths_.end()) {
    return false;
  }
  const std::int64_t left = std::max<std::int64_t>(found->second - thread_depth, 0);
  total_ -= left;
  found->second -= left;
  if (found->second == 0) {
    thread_depths_.erase(found);
  }
  return left > 0 && total_ == 0;
}

void Window::show_device() {
  ++opens_;
  for (const Entry& entry : entries_) {
    if (PyDict_GetItem(entry.dictionary.ptr(), entry.key.ptr()) == entry.host.ptr()) {
      entry.dictionary[entry.key] = entry.device;
    } else {
      ++foreign_;
    }
  }
}

void Window::show_host() {
  for (const Entry& entry : entries_) {
    if (PyDict_GetItem(entry.dictionary.ptr(), entry.key.ptr()) == entry.device.ptr()) {
      entry.dictionary[entry.key] = entry.host;
    }
  }
}

std::string Window::changes() const {
  std::string text;
  for (const Watched& watched : watched_) {
    const Py_ssize_t size = PyDict_Size(watched.dictionary.ptr());
    if (size != watched.size) {
      text += (text.empty() ? "" : "; ") + watched.name + " has " + std::to_string(size) + " entries, had " +
              std::to_string(watched.size);
    }
  }
  return text;
}

}  // namespace hydra
