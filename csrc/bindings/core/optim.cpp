#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "csrc/base/errors.h"
#include "csrc/bindings/bindings.h"
#include "csrc/optim/norm.h"
#include "csrc/pytorch/parameters/tensor_plan.h"

namespace py = pybind11;

namespace hydra {

namespace {

using Released = py::call_guard<py::gil_scoped_release>;

void bind_steps(py::module_& module) {
  py::class_<AdamStep>(module, "AdamStep", "The scalars of one step of Adam or AdamW.")
      .def(py::init([](double learning_rate, double beta1, double beta2, double epsilon, double weight_decay,
                       bool decoupled, std::int64_t step) {
             return AdamStep::make({learning_rate, beta1, beta2, epsilon, weight_decay, decoupled}, step);
           }),
           py::kw_only(), py::arg("learning_rate"), py::arg("beta1"), py::arg("beta2"), py::arg("epsilon"),
           py::arg("weight_decay"), py::arg("decoupled"), py::arg("step"));
  py::class_<SgdStep>(module, "SgdStep", "The scalars of one step of SGD.")
      .def(py::init([](double learning_rate, double momentum, double dampening, double weight_decay, bool nesterov,
                       bool first) {
             return SgdStep::make({learning_rate, momentum, dampening, weight_decay, nesterov}, first);
           }),
           py::kw_only(), py::arg("learning_rate"), py::arg("momentum"), py::arg("dampening"), py::arg("weight_decay"),
           py::arg("nesterov"), py::arg("first"));
  module.def("rounding_seed", &rounding_seed, py::arg("step"), py::arg("ordinal"),
             "The seed of a parameter's stochastic rounding in one step.");
}

}  // namespace

void bind_optim(py::module_& module) {
  py::enum_<InstructionSet>(module, "InstructionSet")
      .value("PORTABLE", InstructionSet::kPortable)
      .value("AVX2", InstructionSet::kAvx2)
      .value("AVX512", InstructionSet::kAvx512);
  module.def("supported_instruction_sets", &supported_instruction_sets,
             "The instruction sets that this machine can run, from slow to fast.");
  py::class_<ThreadPool, std::shared_ptr<ThreadPool>>(
      module, "ThreadPool", "Threads that share the work of one call; the caller is one of them.")
      .def(py::init<int>(), py::arg("threads"))
      .def_property_readonly("threads", &ThreadPool::threads);
  bind_steps(module);
  py::class_<TensorPlan>(module, "TensorPlan", "The updates of one optimizer step.")
      .def(py::init([](std::optional<InstructionSet> instructions) {
             return TensorPlan(instructions.value_or(best_instruction_set()));
           }),
           py::arg("instructions") = std::nullopt)
      .def(
          "add",
          [](TensorPlan& plan, const std::variant<AdamStep, SgdStep>& step, at::Tensor weights, at::Tensor gradient,
             OptionalTensor master, OptionalTensor first_moment, OptionalTensor second_moment, std::uint32_t seed,
             OptionalTensor new_weights) {
            plan.add({step, std::move(weights), std::move(new_weights), std::move(gradient), std::move(master),
                      std::move(first_moment), std::move(second_moment), seed});
          },
          py::arg("step"), py::arg("weights"), py::arg("gradient"), py::kw_only(), py::arg("master") = std::nullopt,
          py::arg("first_moment") = std::nullopt, py::arg("second_moment") = std::nullopt, py::arg("seed") = 0,
          py::arg("new_weights") = std::nullopt)
      .def(
          "run", [](const TensorPlan& plan, ThreadPool& pool, float scale) { plan.on_host().run(pool, scale); },
          py::arg("pool"), py::arg("scale") = 1.0F, Released(), "Runs the updates on the host.");
  module.def(
      "sums_of_squares",
      [](const std::vector<at::Tensor>& tensors, ThreadPool& pool, std::optional<InstructionSet> instructions) {
        const py::gil_scoped_release released;
        return tensor_sums(tensors, pool, instructions.value_or(best_instruction_set()));
      },
      py::arg("tensors"), py::arg("pool"), py::arg("instructions") = std::nullopt);
  module.def("norm_of_sums", [](const std::vector<double>& sums) { return norm_of_sums(sums); }, py::arg("sums"));
  module.def("clip_factor", &clip_factor, py::arg("norm"), py::arg("max_norm"));
}

}  // namespace hydra
