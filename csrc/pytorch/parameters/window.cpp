#include "csrc/pytorch/parameters/window.h"

#include <algorithm>

namespace py = pybind11;

namespace hydra {

namespace {

/// Calls `visit(key, value)` for each entry. `visit` may replace values, but not add or remove keys.
template <class Visit>
void each_entry(const py::dict& dictionary, const Visit& visit) {
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(dictionary.ptr(), &position, &key, &value) != 0) {
    visit(key, value);
  }
}

/// Returns `name` in the form in which it is appended to `list`.
std::string listed(const std::string& list, const std::string& name) {
  return (list.empty() ? "'" : ", '") + name + "'";
}

std::string text_of(PyObject* key) { return py::str(py::handle(key)).cast<std::string>(); }

/// Calls `visit(dictionary, name)` for each parameter of a module and its submodules. Does nothing for other objects.
template <class Visit>
void each_parameter(const py::object& module, const Visit& visit) {
  if (!py::hasattr(module, "named_modules")) {
    return;
  }
  for (const py::handle item : module.attr("named_modules")()) {
    const auto [path, part] = item.cast<std::pair<std::string, py::object>>();
    const py::object own = part.attr("_parameters");
    if (py::isinstance<py::dict>(own)) {  // scripted modules have no dictionary
      each_entry(own, [&visit, &own, prefix = path.empty() ? "" : path + "."](PyObject* key, PyObject* value) {
        if (value != Py_None) {
          visit(py::reinterpret_borrow<py::dict>(own), prefix + text_of(key));
        }
      });
    }
  }
}

}  // namespace

Window::~Window() = default;

void Window::add(py::object host, py::object device) {
  const PyObject* const face = device.ptr();
  const PyObject* const known = host.ptr();
  host_of_.emplace(face, host);
  device_of_.emplace(known, std::move(device));
}

void Window::watch(py::dict dictionary, std::string name) {
  Watched watched{std::move(dictionary), std::move(name), {}};
  if (!watched.name.empty()) {
    each_entry(watched.dictionary, [&](PyObject* key, PyObject* value) {
      watched.known.emplace_back(py::reinterpret_borrow<py::object>(key), py::reinterpret_borrow<py::object>(value));
    });
  }
  watched_.push_back(std::move(watched));
}

// ---- depths -----------------------------------------------------------------------------------

Window::Depths Window::depths() const {
  const std::lock_guard lock(mutex_);
  const auto found = inside_.find(std::this_thread::get_id());
  return found == inside_.end() ? Depths{0, total_, false}
                                : Depths{found->second.depth, total_, found->second.backward};
}

bool Window::in_backward() const {
  const std::lock_guard lock(mutex_);
  return std::any_of(inside_.begin(), inside_.end(), [](const auto& entry) { return entry.second.backward; });
}

Window::Depths Window::enter(bool backward) {
  const std::lock_guard lock(mutex_);
  Inside& inside = inside_[std::this_thread::get_id()];
  const Depths before{inside.depth, total_, inside.backward};
  inside.backward = inside.depth == 0 ? backward : inside.backward;
  ++inside.depth;
  ++total_;
  return before;
}

bool Window::exit_to(std::thread::id thread, std::int64_t thread_depth) {
  const std::lock_guard lock(mutex_);
  const auto found = inside_.find(thread);
  if (found == inside_.end()) {
    return false;
  }
  const std::int64_t left = std::max<std::int64_t>(found->second.depth - thread_depth, 0);
  total_ -= left;
  found->second.depth -= left;
  if (found->second.depth == 0) {
    inside_.erase(found);
    left_.notify_all();
  }
  return total_ == 0;
}

bool Window::exit_all() {
  const std::lock_guard lock(mutex_);
  inside_.clear();
  return std::exchange(total_, 0) > 0;
}

bool Window::wait_for_others(std::chrono::milliseconds patience) {
  const py::gil_scoped_release released;
  std::unique_lock lock(mutex_);
  return left_.wait_for(lock, patience, [this] {
    const auto own = inside_.find(std::this_thread::get_id());
    return total_ == (own == inside_.end() ? 0 : own->second.depth);
  });
}

// ---- dictionaries -----------------------------------------------------------------------------

std::int64_t Window::show(const Faces& faces) {
  std::int64_t others = 0;
  for (const Watched& watched : watched_) {
    std::size_t index = 0;
    each_entry(watched.dictionary, [&](PyObject* key, PyObject* value) {
      if (const auto face = faces.find(value); face != faces.end()) {
        PyDict_SetItem(watched.dictionary.ptr(), key, face->second.ptr());
      } else if (index < watched.known.size()) {
        others += device_of_.contains(watched.known[index].second.ptr()) ? 1 : 0;
      }
      ++index;
    });
  }
  return others;
}

void Window::show_device() {
  ++opens_;
  foreign_ += show(device_of_);
}

void Window::show_host() { show(host_of_); }

void Window::clear() {
  watched_.clear();
  device_of_.clear();
  host_of_.clear();
}

std::string Window::changes() {
  std::string text;
  for (Watched& watched : watched_) {
    if (watched.name.empty() || as_known(watched)) {
      continue;
    }
    const std::string change = changes_of(watched);
    text += (text.empty() || change.empty() ? "" : "; ") + change;
  }
  return text;
}

bool Window::as_known(const Watched& watched) const {
  bool same = PyDict_Size(watched.dictionary.ptr()) == static_cast<Py_ssize_t>(watched.known.size());
  std::size_t index = 0;
  each_entry(watched.dictionary, [&](PyObject* key, PyObject* value) {
    if (same) {
      const auto& [name, known] = watched.known[index];
      // A functional call puts other tensors in the places of parameters.
      same = name.ptr() == key && (known.ptr() == value || device_of_.contains(known.ptr()));
    }
    ++index;
  });
  return same;
}

std::string Window::changes_of(Watched& watched) const {
  std::string gained;
  std::string lost;
  std::string replaced;
  Entries now;
  each_entry(watched.dictionary, [&](PyObject* key, PyObject* value) {
    now.emplace_back(py::reinterpret_borrow<py::object>(key), py::reinterpret_borrow<py::object>(value));
  });
  for (const auto& [key, value] : now) {
    const auto before = std::find_if(watched.known.begin(), watched.known.end(),
                                     [&name = key](const auto& entry) { return entry.first.equal(name); });
    if (before == watched.known.end()) {
      gained += value.is_none() || device_of_.contains(value.ptr()) ? "" : listed(gained, text_of(key.ptr()));
    } else if (!before->second.is(value) && !device_of_.contains(before->second.ptr())) {
      const std::string strangers = strangers_in(value, before->second);
      replaced += strangers.empty() ? "" : listed(replaced, text_of(key.ptr())) + " by one with " + strangers;
    }
  }
  for (const auto& [key, value] : watched.known) {
    if (!watched.dictionary.contains(key) && !value.is_none() && !shown_anywhere(value.ptr())) {
      lost += listed(lost, text_of(key.ptr()));
    }
  }
  if (gained.empty() && lost.empty() && replaced.empty()) {
    watched.known = std::move(now);
    return {};
  }
  std::string text;
  for (const auto& [verb, names] : {std::pair{" gained ", gained}, {" lost ", lost}, {" replaced ", replaced}}) {
    text += names.empty() ? "" : (text.empty() ? watched.name : " and") + verb + names;
  }
  return text;
}

std::string Window::strangers_in(const py::object& module, const py::object& before) const {
  std::string names;
  each_parameter(module, [&](const py::dict& own, const std::string& name) {
    const bool is_watched = std::any_of(watched_.begin(), watched_.end(),
                                        [&own](const Watched& watched) { return watched.dictionary.is(own); });
    bool is_known = is_watched;
    each_parameter(before, [&](const py::dict&, const std::string& old) { is_known = is_known || old == name; });
    names += is_known ? "" : listed(names, name);
  });
  return names;
}

bool Window::shown_anywhere(const PyObject* host) const {
  bool shown = false;
  for (const Watched& watched : watched_) {
    each_entry(watched.dictionary, [&](PyObject*, PyObject* value) { shown = shown || value == host; });
  }
  return shown;
}

}  // namespace hydra
