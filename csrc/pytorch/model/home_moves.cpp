#include "csrc/pytorch/model/home_moves.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "csrc/base/errors.h"
#include "csrc/pytorch/model/paged_model.h"

namespace hydra {

// ---- away from the host -----------------------------------------------------------------------

bool HomeMoves::settle_on_device(std::int32_t block, const std::vector<at::Tensor>& state) {
  gate_.expect_outside(
      "a block cannot move to the device during the model's forward or backward, or after its context");
  update_.finish(block);
  const auto gate = gate_.hold();
  gate_.expect_outside("a block cannot move to the device while another thread is inside the model");
  if (homes_.home_of(block) == Home::kDevice) {
    return true;
  }
  return changes_.synchronise(block) && homes_.device().settle(block, blocks_.backing(block), state, blocks_.owner());
}

void HomeMoves::settle_state_on_disk(std::int32_t block, const std::vector<at::Tensor>& state) {
  constexpr const char* kWhen =
      "optimizer state cannot move to the disk during the model's forward or backward, or outside its context";
  DiskHomes& disk = homes_.disk().expect_open(kWhen);
  gate_.expect_outside(kWhen);
  update_.finish(block);
  disk.settle(block, state, blocks_.owner());
}

bool HomeMoves::settle_weights_on_disk(std::int32_t block) {
  constexpr const char* kWhen =
      "weights cannot move to the disk during the model's forward or backward, or outside its context";
  DiskHomes& disk = homes_.disk().expect_open(kWhen);
  gate_.expect_outside(kWhen);
  update_.finish(block);
  const auto gate = gate_.hold();
  gate_.expect_outside("a block cannot move to the disk while another thread is inside the model");
  if (homes_.home_of(block) == Home::kDisk) {
    return true;
  }
  if (!changes_.synchronise(block)) {
    return false;
  }
  BlockBacking& backing = blocks_.backing(block);
  backing.goes_to_disk(homes_.disk().loans());
  return disk.settle_weights(block, backing, blocks_.owner());
}

// ---- back to the host -------------------------------------------------------------------------

void HomeMoves::bring_home(std::int32_t block) {
  update_.finish(block);
  homes_.device().bring_home(block);
  if (DiskHomes* const disk = homes_.disk().homes()) {
    disk->bring_home(block);
  }
}

void HomeMoves::bring_home(std::int32_t block, const c10::Storage& storage) {
  update_.finish(block, storage);
  homes_.device().bring_home(block);
  if (DiskHomes* const disk = homes_.disk().homes()) {
    disk->bring_home(block, storage);
  }
}

void HomeMoves::bring_all_home(bool from_disk) {
  update_.finish();
  homes_.device().bring_home();
  if (DiskHomes* const disk = homes_.disk().homes(); from_disk && disk != nullptr) {
    disk->bring_home();
  }
}

void HomeMoves::review() {
  homes_.device().review();
  for (std::size_t index = 0; index < blocks_.backings().size(); ++index) {
    const auto block = static_cast<std::int32_t>(index);
    const auto& parameters = blocks_.parameters_of(block);
    if (homes_.home_of(block) == Home::kDisk &&
        !std::all_of(parameters.begin(), parameters.end(),
                     [](const HostParameter* parameter) { return parameter->on_disk(); })) {
      update_.finish(block);  // it works on the bytes from before
      homes_.disk().homes()->bring_weights_home(block);
    }
  }
}

void HomeMoves::abandon() noexcept {
  const bool here = process_.here();  // a forked child lacks the threads, and cannot tell what is updated
  if (here) {
    update_.abandon();  // first: it may be working on memory that is dropped below
  }
  homes_.device().abandon();
  if (DiskHomes* const disk = homes_.disk().homes(); here && disk != nullptr) {
    disk->abandon();
  }
}

// ---- in place ---------------------------------------------------------------------------------

void HomeMoves::update(const BlockUpdate& update, ThreadPool& pool, float scale) {
  gate_.expect_outside("an optimizer step cannot run during the model's forward or backward, or after its context");
  HYDRA_EXPECT(update.blocks.size() == 1, StateError,
               "blocks whose weights overlap cannot be updated at home on the device; bring them to the host first");
  const std::int32_t block = update.blocks.front();
  if (!homes_.device().update(block, update.plan, pool, scale)) {
    update.plan.on_host().run(pool, scale);
    for (HostParameter* parameter : blocks_.parameters_of(block)) {
      parameter->note_moved();
    }
  }
}

at::Tensor HomeMoves::read_from_disk(const at::Tensor& tensor) {
  const WithheldPtr withheld = withheld_of(tensor);
  DiskHomes* const disk = homes_.disk().homes();
  if (disk == nullptr || !withheld) {
    return {};
  }
  update_.finish(withheld->block, tensor.storage());
  return disk->read(withheld->block, tensor);
}

bool HomeMoves::scale(const at::Tensor& gradient, double factor) {
  if (homes_.device().multiply_gradient(gradient, factor)) {
    return true;
  }
  if (!homes_.disk().holds(gradient)) {
    return false;
  }
  const std::int32_t block = withheld_of(gradient)->block;
  bring_home(block, gradient.storage());
  {
    const at::NoGradGuard no_grad;
    gradient.mul_(python_number(factor));
  }
  spill_.store(block);
  return true;
}

void scale_gradient(const at::Tensor& gradient, double factor) {
  const WithheldPtr withheld = withheld_of(gradient);
  const std::shared_ptr<PagedModel> model = withheld ? withheld->owner.lock() : nullptr;
  if (!model || !model->moves().scale(gradient, factor)) {
    const at::NoGradGuard no_grad;
    gradient.mul_(python_number(factor));
  }
}

}  // namespace hydra
