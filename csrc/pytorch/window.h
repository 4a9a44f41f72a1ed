// The swap window: which of a weight's two faces a module's dictionary shows.
//
// While a window is open the dictionaries of all modules show device parameters; outside, host parameters. An
// entry is swapped only if it holds what is expected, so that tensors put there by functional calls stay.
// Each thread has its own depth; the swap happens when the first thread enters and ends when the last leaves.
// exit_to() restores the depth a thread had at some earlier moment, so that an exception that skipped inner
// exits is healed by the outer one.
//
// Threads: any, with the interpreter lock held; a mutex of its own guards the depths.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace hydra {

class Window {
 public:
  Window() = default;
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  /// `dictionary[key]` is `host` now and shows `device` while the window is open.
  void add(pybind11::dict dictionary, pybind11::str key, pybind11::object host, pybind11::object device);
  /// The dictionary is not to gain or lose entries while the context lives.
  void watch(pybind11::dict dictionary, std::string name);

  /// Depths before the call: the thread's, and of all threads together.
  struct Depths {
    std::int64_t thread = 0;
    std::int64_t total = 0;
  };
  Depths depths() const;
  /// One deeper. Returns the depths before.
  Depths enter();
  /// Back to `thread_depth`. Returns true if no thread is inside any more.
  bool exit_to(std::int64_t thread_depth);

  void show_device();
  void show_host();
  /// Names of watched dictionaries and entries that are not as they were; empty when nothing changed.
  std::string changes() const;

  std::int64_t opens() const noexcept { return opens_; }
  /// Entries found to hold something else when they were to be swapped, over all openings.
  std::int64_t foreign_entries() const noexcept { return foreign_; }

 private:
  struct Entry {
    pybind11::dict dictionary;
    pybind11::str key;
    pybind11::object host;
    pybind11::object device;
  };
  struct Watched {
    pybind11::dict dictionary;
    std::string name;
    Py_ssize_t size = 0;
  };

  mutable std::mutex mutex_;
  std::map<std::thread::id, std::int64_t> thread_depths_;
  std::int64_t total_ = 0;
  std::vector<Entry> entries_;
  std::vector<Watched> watched_;
  std::int64_t opens_ = 0;
  std::int64_t foreign_ = 0;
};

}  // namespace hydra
