// The swap window: decides which of a weight's two faces the modules' dictionaries show.
//
// While a window is open, the dictionaries of all modules show device parameters; otherwise they show host parameters.
// Parameters are found by identity, at any position, since they may be tied or renamed inside the context. Tensors that
// functional calls have put in their places stay. Each thread has its own depth. The swap happens when the first thread
// enters, and is undone when the last one leaves. exit_to() restores the depth that a thread had at an earlier moment:
// if an exception skips inner exits, the outer exit repairs the depth.
//
// Owns references to the dictionaries and parameters. Threads: any, with the interpreter lock held; a mutex of its own
// guards the depths.
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

  /// Shows `device` in place of `host` while the window is open.
  void add(pybind11::object host, pybind11::object device);
  /// Watches a module's dictionary of parameters or of submodules, called `name` in messages. While the context lives,
  /// it must not gain or lose entries, and no submodule may be replaced by one with unknown parameters. A dictionary
  /// without a name may change. Called after add() of all parameters.
  void watch(pybind11::dict dictionary, std::string name);

  /// The depth of the calling thread, the sum over all threads, and whether the thread is inside a backward.
  struct Depths {
    std::int64_t thread = 0;
    std::int64_t total = 0;
    bool in_backward = false;
  };
  Depths depths() const;
  /// Whether the outermost entry of any thread is a backward.
  bool in_backward() const;
  /// Goes one level deeper. Returns the depths before.
  Depths enter(bool backward);
  /// Sets the depth of `thread` back to `thread_depth`. Returns true if no thread is inside any more.
  bool exit_to(std::thread::id thread, std::int64_t thread_depth);
  /// Sets the depth of every thread to 0. Returns whether a thread was inside.
  bool exit_all();
  /// Blocks until no other thread is inside, without the interpreter lock. Returns false after `patience`.
  bool wait_for_others(std::chrono::milliseconds patience);

  void show_device();
  void show_host();
  /// Forgets all dictionaries and parameters. The dictionaries have to show hosts.
  void clear();
  /// Describes what modules have gained, lost or replaced; empty if nothing. Parameters may move to another name, have
  /// several names, or be replaced by others.
  std::string changes();

  std::int64_t opens() const noexcept { return opens_; }
  /// The number of entries that had an unknown value at a swap, over all openings.
  std::int64_t foreign_entries() const noexcept { return foreign_; }

 private:
  using Entries = std::vector<std::pair<pybind11::object, pybind11::object>>;
  struct Watched {
    pybind11::dict dictionary;
    std::string name;
    /// The entries, in order, when the dictionary was watched or last found unchanged.
    Entries known;
  };
  using Faces = std::unordered_map<const PyObject*, pybind11::object>;

  bool as_known(const Watched& watched) const;
  std::string changes_of(Watched& watched) const;
  /// The names of parameters in `module` that no watched dictionary has, and that its predecessor `before` lacks.
  std::string strangers_in(const pybind11::object& module, const pybind11::object& before) const;
  bool shown_anywhere(const PyObject* host) const;
  /// Replaces every value that is a key of `faces`. Returns the number of other values.
  std::int64_t show(const Faces& faces);

  mutable std::mutex mutex_;
  std::condition_variable left_;
  struct Inside {
    std::int64_t depth = 0;
    bool backward = false;  // the outermost entry is a backward
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
