// What a paged model has on the disk: what goes there, when it does, and how it comes home.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "csrc/base/errors.h"
#include "csrc/pytorch/model/paged_model.h"
#include "csrc/pytorch/threads/gil.h"

namespace hydra {

namespace {

class DiskLender final : public Lender {
 public:
  DiskLender(DiskHomes& disk, std::int32_t block, TensorPlan plan)
      : disk_(disk), block_(block), plan_(std::move(plan)), places_(disk.places(block, plan_)) {}

  void expect() noexcept override { disk_.expect(block_); }
  StepPlan borrow() override { return disk_.borrow(block_, plan_, places_); }
  void give_back() override { disk_.give_back(block_); }

 private:
  DiskHomes& disk_;
  std::int32_t block_;
  TensorPlan plan_;
  DiskHomes::Places places_;
};

}  // namespace

DeferredUpdate::Part PagedModel::part_of(const BlockUpdate& update) const {
  const bool on_disk = disk_ && std::any_of(update.tensors.begin(), update.tensors.end(),
                                            [this](const at::Tensor& tensor) { return disk_->holds(tensor); });
  DeferredUpdate::Part part;
  part.blocks = update.blocks;
  if (on_disk) {
    HYDRA_EXPECT(update.blocks.size() == 1, StateError,
                 "a joint update of blocks whose weights overlap, some of which are on the disk");
    part.lender = std::make_unique<DiskLender>(*disk_, update.blocks.front(), update.plan);
  } else {
    part.plan = update.plan.on_host();
  }
  return part;
}

void PagedModel::open_disk(const std::string& folder, const std::vector<Bytes>& sizes,
                           std::shared_ptr<FileOperations> files) {
  HYDRA_EXPECT(!disk_ && !closed_, StateError, "a second spill_dir of one offload context");
  auto disk = std::make_unique<DiskHomes>(folder, arena_, std::move(files));
  disk->reserve(sizes);
  disk_ = std::move(disk);
  loans_ = std::make_shared<WeightLoans>(*disk_, arena_, disk_fills());
  gradient_buffers_ = std::make_shared<HostBuffers>(arena_);
  sink_->set_fetch([this](const at::Tensor& gradient) {
    if (disk_ && disk_->holds(gradient)) {
      disk_->bring_home(withheld_of(gradient)->block, gradient.storage());
    }
  });
}

DiskStatistics PagedModel::disk_statistics() const {
  if (!disk_ || !home_.here()) {
    return disk_used_;
  }
  DiskStatistics statistics = disk_->statistics();
  statistics.wait_seconds += loans_->wait_seconds();
  statistics.working_bytes += loans_->bytes() + gradient_buffers_->lent_bytes() + gradient_buffers_->kept_bytes();
  return statistics;
}

void PagedModel::expect_disk_here() const {
  if (disk_) {
    home_.expect_here();
  }
}

void PagedModel::close_disk() noexcept {
  if (!home_.here()) {
    // Other threads may have been at it when the child was forked, and none of them is here to come to an end.
    static_cast<void>(disk_.release());
    return;
  }
  disk_used_ = disk_statistics();
  for (BlockBacking* backing : backings_) {
    backing->goes_to_disk(nullptr);
    for (HostParameter* parameter : backing->parameters()) {
      parameter->gradient_buffers.reset();
    }
  }
  gradient_buffers_.reset();
  loans_.reset();
  disk_.reset();
}

// ---- to the disk ------------------------------------------------------------------------------

void PagedModel::settle_on_disk(std::int32_t block, const std::vector<at::Tensor>& state) {
  HYDRA_EXPECT(disk_ && !closed_ && !window_open(), StateError,
               "optimizer state moves to the disk during the model's forward or backward, or outside its context");
  finish_update(block);
  disk_->settle(block, state, weak_from_this());
}

bool PagedModel::settle_weights_on_disk(std::int32_t block) {
  HYDRA_EXPECT(disk_ && !closed_ && !window_open(), StateError,
               "weights move to the disk during the model's forward or backward, or outside its context");
  finish_update(block);
  const std::lock_guard gate(gate_);
  HYDRA_EXPECT(!closed_ && !window_open(), StateError,
               "a block moves to the disk while another thread is inside the model");
  if (disk_->holds_weights(block)) {
    return true;
  }
  if (!synchronise_block(block)) {
    return false;
  }
  BlockBacking& backing = *backings_[static_cast<std::size_t>(block)];
  backing.goes_to_disk(loans_);
  return disk_->settle_weights(block, backing, weak_from_this());
}

void PagedModel::send_gradients_to_disk(std::int32_t block, Bytes backlog) {
  HYDRA_EXPECT(disk_ && !closed_, StateError, "gradients on the disk, outside their context");
  for (HostParameter* parameter : backings_[static_cast<std::size_t>(block)]->parameters()) {
    parameter->gradient_buffers = gradient_buffers_;
  }
  gradient_backlog_ = std::max(gradient_backlog_, backlog);
}

at::Tensor PagedModel::make_on_disk(std::int32_t block, const at::Tensor& like, at::ScalarType dtype, bool copies) {
  HYDRA_EXPECT(disk_ && !closed_, StateError, "optimizer state on the disk, outside its context");
  return disk_->make(block, like, dtype, copies, weak_from_this());
}

// ---- gradients --------------------------------------------------------------------------------

void PagedModel::note_left(const BlockList& blocks) {
  if (gradient_backlog_ == 0) {
    return;
  }
  {
    const std::lock_guard lock(leaving_mutex_);
    for (const std::int32_t block : blocks) {
      if (std::find(left_.begin(), left_.end(), block) == left_.end()) {
        left_.push_back(block);
      }
    }
  }
  // The last one's gradients may be on their way still; there is no need to wait for them.
  store_left_gradients(/*leave=*/1);
}

void PagedModel::store_left_gradients(std::size_t leave) {
  const std::lock_guard lock(leaving_mutex_);
  while (left_.size() > leave) {
    store_gradients_of(left_.front());
    left_.pop_front();
  }
}

void PagedModel::store_gradients() {
  if (gradient_backlog_ == 0) {
    return;
  }
  const std::lock_guard lock(leaving_mutex_);
  left_.clear();
  for (std::size_t block = 0; block < backings_.size(); ++block) {
    store_gradients_of(static_cast<std::int32_t>(block));
  }
}

void PagedModel::store_gradients_of(std::int32_t block) {
  const auto& parameters = backings_[static_cast<std::size_t>(block)]->parameters();
  const auto gradient_of = [](const HostParameter* parameter) -> const at::Tensor& {
    return parameter->host.unsafeGetTensorImpl()->grad();
  };
  if (std::none_of(parameters.begin(), parameters.end(),
                   [&](const HostParameter* parameter) { return parameter->lent(gradient_of(parameter)); })) {
    return;
  }
  sink_->bring_home(parameters);
  sink_->norm().finish();
  sink_->between_gradients([&] {
    std::vector<at::Tensor> gradients;
    for (const HostParameter* parameter : parameters) {
      // An array of numpy's, say, would lose its memory: such a gradient stays.
      const std::size_t known = sink_->norm().holds(*parameter) ? 2 : 1;
      if (parameter->lent(gradient_of(parameter)) && gradient_of(parameter).storage().use_count() <= known) {
        gradients.push_back(gradient_of(parameter));
      }
    }
    disk_->store_gradients(block, gradients, weak_from_this(), gradient_backlog_);
  });
}

bool PagedModel::scale_on_disk(const at::Tensor& gradient, double factor) {
  if (!disk_ || !disk_->holds(gradient)) {
    return false;
  }
  const std::int32_t block = withheld_of(gradient)->block;
  bring_home(block, gradient.storage());
  {
    const at::NoGradGuard no_grad;
    gradient.mul_(python_number(factor));
  }
  store_gradients_of(block);
  return true;
}

// ---- and home ---------------------------------------------------------------------------------

at::Tensor PagedModel::read_from_disk(const at::Tensor& tensor) {
  const WithheldPtr withheld = withheld_of(tensor);
  if (!disk_ || !withheld) {
    return {};
  }
  finish_update(withheld->block, tensor.storage());
  return disk_->read(withheld->block, tensor);
}

void PagedModel::review_disk() {
  for (std::size_t block = 0; disk_ && block < backings_.size(); ++block) {
    const auto& parameters = backings_[block]->parameters();
    if (disk_->holds_weights(static_cast<std::int32_t>(block)) &&
        !std::all_of(parameters.begin(), parameters.end(),
                     [](const HostParameter* parameter) { return parameter->on_disk(); })) {
      finish_update(static_cast<std::int32_t>(block));  // which works on the bytes from before
      disk_->bring_weights_home(static_cast<std::int32_t>(block));
    }
  }
}

void PagedModel::bring_home(std::int32_t block) {
  finish_update(block);
  homes_.bring_home(block);
  if (disk_) {
    disk_->bring_home(block);
  }
}

void PagedModel::bring_home(std::int32_t block, const c10::Storage& storage) {
  finish_update(block, storage);
  homes_.bring_home(block);
  if (disk_) {
    disk_->bring_home(block, storage);
  }
}

void PagedModel::bring_home_from_device() {
  finish_update();
  homes_.bring_home();
}

void PagedModel::bring_home() {
  bring_home_from_device();
  if (disk_) {
    disk_->bring_home();
  }
}

}  // namespace hydra
