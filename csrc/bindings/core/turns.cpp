// Bindings of csrc/base/device_turns.h.
#include "csrc/base/device_turns.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <map>

#include "csrc/bindings/bindings.h"

namespace py = pybind11;

namespace hydra {

namespace {

/// Keeps the turn from __enter__ to __exit__, which one thread calls.
class UndisturbedContext {
 public:
  void enter() { scope_.emplace(); }
  void exit() { scope_.reset(); }

 private:
  std::optional<Undisturbed> scope_;
};

/// Exchanges the state of the process by two functions of Python's. Another thread may raise an exception in the midst
/// of either one (PyThreadState_SetAsyncExc), which must not leave half of a state behind. So the function is called
/// again, and the exception is raised behind it.
class Exchange {
 public:
  using Function = std::function<void(DeviceTurns::Tenant)>;

  Exchange(Function note, Function restore) : note_(std::move(note)), restore_(std::move(restore)) {}

  void operator()(std::optional<DeviceTurns::Tenant> from, DeviceTurns::Tenant to) const {
    const py::gil_scoped_acquire locked;
    py::object interrupt;
    if (from) {
      call(note_, *from, interrupt);
    }
    call(restore_, to, interrupt);
    if (interrupt) {
      PyThreadState_SetAsyncExc(PyThread_get_thread_ident(), interrupt.ptr());
    }
  }

 private:
  static void call(const Function& function, DeviceTurns::Tenant tenant, py::object& interrupt) {
    for (;;) {
      try {
        function(tenant);
        return;
      } catch (const py::error_already_set& error) {
        if (error.matches(PyExc_Exception)) {
          throw;  // its own
        }
        interrupt = error.type();
      }
    }
  }

  Function note_;
  Function restore_;
};

/// Turns of threads of Python. The interpreter lock guards its fields.
class ThreadTurns final : public DeviceTurns {
 public:
  using DeviceTurns::DeviceTurns;

  /// Calls a function as the tenant. The turn passes on behind it, whatever it raises and whenever.
  py::object stay(Tenant tenant, const py::function& function) {
    const Stay its(*this, tenant);
    return function();
  }

  /// Raises KeyboardInterrupt inside the tenant's stay, and never behind it.
  void interrupt(Tenant tenant) const {
    if (const auto found = inside_.find(tenant); found != inside_.end()) {
      PyThreadState_SetAsyncExc(found->second, PyExc_KeyboardInterrupt);
    }
  }

 private:
  class Stay {
   public:
    Stay(ThreadTurns& turns, Tenant tenant) : turns_(turns), tenant_(tenant) {
      {
        const py::gil_scoped_release released;
        turns_.enter(tenant_);
      }
      turns_.inside_.emplace(tenant_, PyThread_get_thread_ident());
    }
    ~Stay() {
      turns_.inside_.erase(tenant_);
      PyThreadState_SetAsyncExc(PyThread_get_thread_ident(), nullptr);
      const py::gil_scoped_release released;
      turns_.leave();
    }
    Stay(const Stay&) = delete;
    Stay& operator=(const Stay&) = delete;

   private:
    ThreadTurns& turns_;
    Tenant tenant_;
  };

  std::map<Tenant, unsigned long> inside_;  // the threads
};

}  // namespace

void bind_turns(py::module_& module) {
  DeviceTurns::keep_turn_if([] { return PyGILState_Check() == 1; });
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<ThreadTurns>(module, "DeviceTurns", "Turns of several runs on one device.")
      .def(py::init([](const py::function& note, const py::function& restore) {
             return std::make_unique<ThreadTurns>(
                 Exchange(note.cast<Exchange::Function>(), restore.cast<Exchange::Function>()));
           }),
           py::arg("note"), py::arg("restore"),
           "`note` keeps a tenant's state of the process, and `restore` sets it. Both may be called twice.")
      .def("admit", &ThreadTurns::admit)
      .def("stay", &ThreadTurns::stay, py::arg("tenant"), py::arg("function"),
           "Waits for the turn, and calls the function in it.")
      .def("interrupt", &ThreadTurns::interrupt, py::arg("tenant"),
           "Raises KeyboardInterrupt inside the tenant's stay.")
      .def("computed", &ThreadTurns::computed, py::arg("tenant"), Released(), "Seconds of the tenant's turns.")
      .def_property_readonly("switches", [](const ThreadTurns& turns) {
        const py::gil_scoped_release released;
        return turns.switches();
      });
  module.def(
      "seat",
      []() -> std::optional<std::pair<std::uintptr_t, DeviceTurns::Tenant>> {
        const DeviceTurns::Seat seat = DeviceTurns::seat();
        const auto place = std::pair(reinterpret_cast<std::uintptr_t>(seat.turns), seat.tenant);
        return seat.turns != nullptr ? std::optional(place) : std::nullopt;
      },
      "The shared device and the tenant of the calling thread; None in other threads.");
  py::class_<UndisturbedContext>(module, "Undisturbed", "A scope in which the calling thread's tenant keeps the turn.")
      .def(py::init<>())
      .def("__enter__", &UndisturbedContext::enter)
      .def("__exit__", [](UndisturbedContext& context, const py::object&, const py::object&, const py::object&) {
        context.exit();
      });
}

}  // namespace hydra
