#include "csrc/pytorch/model/paged_model.h"

#include <pybind11/pybind11.h>

#include <exception>

#include "csrc/base/errors.h"
#include "csrc/pytorch/model/fault_path.h"
#include "csrc/pytorch/threads/error_bridge.h"
#include "csrc/pytorch/threads/gil.h"

namespace py = pybind11;

namespace hydra {

PagedModel::PagedModel(std::shared_ptr<DeviceBackend> backend, std::shared_ptr<HostArena> arena,
                       const PagedModelOptions& options)
    : memory_(std::move(backend), std::move(arena), options.budget, options.device.is_cpu()),
      blocks_(memory_.arena(), options.device, options.face_dtype),
      pager_(memory_.backend(), memory_.slots(), memory_.ledger(), pager_options(options)),
      homes_(memory_.backend(), pager_, memory_.optimizer_state(), memory_.arena(), blocks_, gate_),
      gradients_(memory_.backend(), memory_.arena(), blocks_, homes_, gate_, options.gradient_dtype,
                 options.gradient_bound),
      update_(memory_.backend(), blocks_, homes_.disk(), gradients_.sink().norm(), gate_),
      changes_(blocks_, pager_, homes_, gradients_, gate_, options.poison_hosts),
      moves_(blocks_, homes_, gradients_.spill(), update_, changes_, gate_),
      arrivals_(memory_, blocks_, pager_),
      rounds_(memory_, blocks_, pager_, gradients_, arrivals_, gate_),
      window_(*this) {
  register_fault_path();
  if (options.stash) {
    arrivals_.timeline().ask_also([stash = options.stash] { return stash->obstacle(); });
  }
  memory_.open(
      [this] {
        const ReleaseGilIfHeld released;
        try {
          return pager_.evict_one();
        } catch (const Error&) {
          rethrow_for_torch({});
        }
      },
      [this] { return arrivals_.timeline().explain(); });
}

PagerOptions PagedModel::pager_options(const PagedModelOptions& options) {
  PagerOptions made;
  made.relief.reliever = [this, stash = options.stash] {
    return gradients_.sink().relieve() || (stash && stash->await_leaving());
  };
  made.relief.last_resort = [this, stash = options.stash] {
    const ReleaseGilIfHeld released;
    return (stash && stash->give_one_up()) || homes_.device().give_one_up();
  };
  DeviceMeter meter = memory_.meter();
  // The meter counts gradients on their way as activations.
  made.activations.gradient_reserve = meter.take_peak ? options.gradient_bound : 0;
  made.activations.meter = std::move(meter.take_peak);
  made.activations.slack = meter.slack;
  made.fault_path = options.fault_path;
  return made;
}

PagedModel::~PagedModel() {
  try {
    close();
  } catch (const std::exception& error) {  // there is no caller to tell
    TORCH_WARN("hydra_ext: an offload context that was not left has lost bytes: ", error.what());
  }
  // In case close() has failed: no allocation calls the pager once the parts that its functions use are destroyed.
  memory_.stop_serving();
  memory_.close();
}

std::int32_t PagedModel::add_block(std::string name,
                                   const std::vector<std::pair<std::string, at::Tensor>>& parameters) {
  auto backing = blocks_.add(name, parameters, weak_from_this(), [this](HostParameter& parameter) {
    gradients_.install_hooks(parameter, [this, &parameter] { rounds_.note_summed(parameter); });
  });
  const Bytes bytes = memory_.backend().slots().taken_by(backing->slot_bytes());
  return pager_.add_block(std::move(name), bytes, std::move(backing));
}

void PagedModel::close() {
  if (!gate_.close()) {
    return;
  }
  const py::gil_scoped_acquire locked;  // the last owner may be a thread of autograd's
  window_.close();
  const py::gil_scoped_release released;
  std::exception_ptr lost;
  try {
    moves_.bring_all_home(/*from_disk=*/true);
  } catch (...) {  // re-raised at the end
    lost = std::current_exception();
    moves_.abandon();
  }
  memory_.stop_serving();  // before the pager closes: allocations must not call it any more
  pager_.close();
  memory_.close();
  changes_.forget();
  memory_.arena()->unpin_all();  // the parameters stay in the arena, and forked children can read them again
  gradients_.clear_hooks();
  blocks_.close();
  homes_.disk().close();
  if (lost) {
    std::rethrow_exception(lost);
  }
}

}  // namespace hydra
