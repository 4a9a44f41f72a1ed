// The functions that bind the folders of csrc, one for each folder or part of one.
//
// module.cpp calls them with the interpreter lock held, in the order of the layers: types are bound before their uses.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

namespace hydra {

class Stash;

namespace schedule {
class Schedule;
}

/// A property's getter that runs without the interpreter lock. For getters that wait for a mutex, whose holder may wait
/// for the interpreter lock.
template <typename Getter>
pybind11::cpp_function released(Getter getter) {
  return pybind11::cpp_function(std::move(getter), pybind11::call_guard<pybind11::gil_scoped_release>());
}

void bind_base(pybind11::module_& module);
void bind_turns(pybind11::module_& module);
void bind_memory(pybind11::module_& module);
void bind_transfer(pybind11::module_& module);
void bind_paging(pybind11::module_& module);
void bind_optim(pybind11::module_& module);
void bind_rows(pybind11::module_& module);
void bind_codec(pybind11::module_& module);
void bind_data(pybind11::module_& module);
void bind_schedule(pybind11::module_& module);
void bind_simulation(pybind11::module_& module, pybind11::class_<schedule::Schedule>& schedule_class);
void bind_plan(pybind11::module_& module);
void bind_activation_plan(pybind11::module_& module);
void bind_step_record(pybind11::module_& module);
void bind_checkpoint_chain(pybind11::module_& module);
void bind_pipeline_partition(pybind11::module_& module);
void bind_job_plan(pybind11::module_& module);
void bind_shard_units(pybind11::module_& module);
void bind_values(pybind11::module_& module);
void bind_pytorch(pybind11::module_& module);
void bind_model(pybind11::module_& module);
void bind_gradients(pybind11::module_& module);
void bind_homes(pybind11::module_& module);
void bind_windows(pybind11::module_& module);
void bind_tensors(pybind11::module_& module);
void bind_rounds(pybind11::module_& module);
void bind_stash(pybind11::module_& module);
void bind_saved_tensors(pybind11::module_& module, pybind11::class_<Stash, std::shared_ptr<Stash>>& stash_class);
void bind_testing(pybind11::module_& module);
void bind_cuda(pybind11::module_& module);        // in builds with CUDA
void bind_cuda_codec(pybind11::module_& module);  // in builds with CUDA

}  // namespace hydra
