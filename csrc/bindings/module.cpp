#include "csrc/bindings/bindings.h"

PYBIND11_MODULE(_C, module) {
  module.doc() =
      "The native core of hydra_ext: memory, transfer, paging, optimizers, schedules, and their use from torch.";
  hydra::bind_base(module);
  hydra::bind_turns(module);
  hydra::bind_memory(module);
  hydra::bind_transfer(module);
  hydra::bind_paging(module);
  hydra::bind_optim(module);
  hydra::bind_rows(module);
  hydra::bind_codec(module);
  hydra::bind_data(module);
  hydra::bind_schedule(module);
  hydra::bind_plan(module);
  hydra::bind_activation_plan(module);
  hydra::bind_step_record(module);
  hydra::bind_checkpoint_chain(module);
  hydra::bind_pipeline_partition(module);
  hydra::bind_job_plan(module);
  hydra::bind_shard_units(module);
  hydra::bind_values(module);
  hydra::bind_stash(module);
  hydra::bind_pytorch(module);
  hydra::bind_tensors(module);
  hydra::bind_rounds(module);
  hydra::bind_testing(module);
#ifdef HYDRA_WITH_CUDA
  hydra::bind_cuda(module);
  hydra::bind_cuda_codec(module);
#endif
}
