#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "csrc/bindings/bindings.h"
#include "csrc/pytorch/counting_allocator.h"
#include "csrc/pytorch/staged_backward.h"
#include "csrc/pytorch/thread_context.h"

namespace py = pybind11;

namespace hydra {

namespace {

using Turns = std::vector<std::pair<std::size_t, std::size_t>>;

std::unique_ptr<StagedBackward> make_backward(const std::vector<at::Tensor>& losses,
                                              std::vector<std::vector<std::uint64_t>> marks, const Turns& order) {
  std::vector<StagedBackward::Turn> turns;
  for (const auto& [microbatch, piece] : order) {
    turns.push_back({microbatch, piece});
  }
  return std::make_unique<StagedBackward>(losses, std::move(marks), std::move(turns));
}

/// Random states are the host's, whoever's turn it is.
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
  py::class_<StagedBackward>(module, "StagedBackward",
                             "Runs the graphs of several microbatches piece by piece, in the order of `turns`.")
      .def(py::init(&make_backward), py::arg("losses"), py::arg("marks"), py::arg("turns"),
           "marks: by microbatch, the sequence numbers its pieces begin at. turns: (microbatch, piece), all of them.")
      .def_property_readonly("refusal", &StagedBackward::refusal)
      .def_property_readonly("held", &StagedBackward::held)
      .def_property_readonly("nested", &StagedBackward::nested)
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
