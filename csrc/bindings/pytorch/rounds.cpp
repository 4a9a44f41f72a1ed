#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "csrc/bindings/bindings.h"
#include "csrc/pytorch/memory/counting_allocator.h"
#include "csrc/pytorch/model/gradient_path.h"
#include "csrc/pytorch/model/staged_backward.h"
#include "csrc/pytorch/threads/thread_context.h"

namespace py = pybind11;

namespace hydra {

namespace {

using Turns = std::vector<std::pair<std::size_t, std::size_t>>;

void plan_turns(StagedBackward& backward, const Turns& order) {
  std::vector<StagedBackward::Turn> turns;
  for (const auto& [microbatch, piece] : order) {
    turns.push_back({microbatch, piece});
  }
  backward.plan(std::move(turns));
}

void run_last_piece(StagedBackward& backward, const GradientPath& path) {
  const py::gil_scoped_release released;
  backward.run_last_piece([&path](const at::Tensor& leaf) { return path.may_accumulate_early(leaf); });
}

/// Random states are the host's, in any turn.
std::vector<at::Tensor> random_states(const std::vector<at::Generator>& generators) {
  const HostScope on_the_host;
  std::vector<at::Tensor> states;
  for (const at::Generator& generator : generators) {
    states.push_back(generator.get_state());
  }
  return states;
}

}  // namespace

void bind_rounds(py::module_& module) {
  py::class_<ThreadContext>(module, "ThreadContext", "What torch keeps of the calling thread, for another thread.")
      .def(py::init<>())
      .def("enter", &ThreadContext::enter, "For good; autocast keeps no casts from here on.");
  module.def("random_states", &random_states, py::arg("generators"), "Of each generator; charged to no device.");
  py::class_<StagedBackward>(module, "StagedBackward", "Runs the graphs of several microbatches piece by piece.")
      .def(py::init<>())
      .def("add", &StagedBackward::add, py::arg("loss"), py::arg("marks"),
           "The next microbatch; marks: the sequence numbers that its pieces begin at.")
      .def(
          "run_last_piece",
          [](StagedBackward& backward, const GradientPath& path) {
            HANDLE_TH_ERRORS
            run_last_piece(backward, path);
            END_HANDLE_TH_ERRORS_PYBIND
          },
          py::arg("gradients"), "Of the microbatch that was added last.")
      .def("plan", &plan_turns, py::arg("turns"), "turns: (microbatch, piece), all of them.")
      .def_property_readonly("refusal", &StagedBackward::refusal)
      .def_property_readonly("held", &StagedBackward::held)
      .def_property_readonly("nested", &StagedBackward::nested)
      .def("leaves", &StagedBackward::leaves, "What the graphs accumulate into, once all are added.")
      .def("last_turns", &StagedBackward::last_turns, py::arg("leaves"),
           "By leaf, the last turn in which something is accumulated into it; -1 where nothing is.")
      .def(
          "run",
          [](StagedBackward& backward, std::size_t turn) {
            HANDLE_TH_ERRORS
            const py::gil_scoped_release released;
            backward.run(turn);
            END_HANDLE_TH_ERRORS_PYBIND
          },
          py::arg("turn"));
}

}  // namespace hydra
