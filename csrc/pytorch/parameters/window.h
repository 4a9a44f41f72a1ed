// The swap window: which of a weight's two faces a module's dictionary shows.
//
// While a window is open the dictionaries of all modules show device parameters; outside, host parameters. What is
// swapped is found by identity, wherever it stands: parameters may be tied or renamed inside the context. Tensors put
// there by functional calls stay. Each thread has its own depth; the swap happens when the first thread enters and
// ends when the last leaves. exit_to() restores the depth a thread had at some earlier moment, so that an exception
// that skipped inner exits is healed by the outer one.
//
// Threads: any, with the interpreter lock held; a mutex of its own guards the depths.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace hydra {

class Window {
 public:
  Window() = default;
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  /// `device` is shown in the place of `host` while the window is open.
  void add(pybind11::object host, pybind11::object device);
  /// A module's parameters, or its submodules, called `name` in messages; neither is to gain or lose any while the
  /// context lives, nor is a submodule to be replaced by one with more of them. After add() of all.
  void watch(pybind11::dict dictionary, std::string name);

  /// Depths before the call: the thread's, and of all threads together; whether the thread is inside a backward.
  struct Depths {
    std::int64_t thread = 0;
    std::int64_t total = 0;
    bool in_backward = false;
  };
  Depths depths() const;
  /// Whether some thread's outermost entry is a backward.
  bool in_backward() const;
  /// One deeper. Returns the depths before.
  Depths enter(bool backward);
  /// The depth of `thread` goes back to `thread_depth`. Returns true if no thread is inside any more.
  bool exit_to(std::thread::id thread, std::int64_t thread_depth);
  /// Puts every thread outside. Returns whether one was inside.
  bool exit_all();
  /// Blocks until no other thread is inside, without the interpreter lock. False when that takes too long.
  bool wait_for_others(std::chrono::milliseconds patience);

  void show_device();
  void show_host();
  /// Forgets all dictionaries and parameters, which are to show hosts.
  void clear();
  /// What modules have gained, lost or replaced, in words; empty when nothing. Parameters that have moved to another
  /// name, or stand under several, are fine, and so are others in their places.
  std::string changes();

  std::int64_t opens() const noexcept { return opens_; }
  /// Entries found to hold something unknown when they were to be swapped, over all openings.
  std::int64_t foreign_entries() const noexcept { return foreign_; }

 private:
  using Entries = std::vector<std::pair<pybind11::object, pybind11::object>>;
  struct Watched {
    pybind11::dict dictionary;
    std::string name;
    /// What was in it, in its order, when it was watched or last found to be fine.
    Entries known;
  };
  using Faces = std::unordered_map<const PyObject*, pybind11::object>;

  bool as_known(const Watched& watched) const;
  std::string changes_of(Watched& watched) const;
  /// Names of parameters in `module` that no watched dictionary holds, and that `before`, in its place, did not have.
  std::string strangers_in(const pybind11::object& module, const pybind11::object& before) const;
  bool shown_anywhere(const PyObject* host) const;
  /// Replaces every value that `faces` knows; returns how many others there are.
  std::int64_t show(const Faces& faces);

  mutable std::mutex mutex_;
  std::condition_variable left_;
  struct Inside {
    std::int64_t depth = 0;
    bool backward = false;  // the outermost is one
  };
  std::map<std::thread::id, Inside> inside_;
  std::int64_t total_ = 0;
  Faces device_of_;
  Faces host_of_;
  std::vector<Watched> watched_;
  std::int64_t opens_ = 0;
  std::int64_t foreign_ = 0;
};

}  // namespace hydra
