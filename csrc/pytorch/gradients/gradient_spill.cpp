#include "csrc/pytorch/gradients/gradient_spill.h"

#include <algorithm>

namespace hydra {

void GradientSpill::begin(std::int32_t block, Bytes backlog) {
  disk_.expect_open("gradients cannot move to the disk outside the model's context");
  for (HostParameter* parameter : blocks_.parameters_of(block)) {
    parameter->gradient_buffers = disk_.gradient_buffers();
  }
  backlog_ = std::max(backlog_, backlog);
}

void GradientSpill::note_left(const BlockList& blocks) {
  if (backlog_ == 0) {
    return;
  }
  const std::lock_guard lock(mutex_);
  for (const std::int32_t block : blocks) {
    if (std::find(left_.begin(), left_.end(), block) == left_.end()) {
      left_.push_back(block);
    }
  }
  while (left_.size() > 1) {
    store(left_.front());
    left_.pop_front();
  }
}

void GradientSpill::store_all() {
  if (backlog_ == 0) {
    return;
  }
  const std::lock_guard lock(mutex_);
  left_.clear();
  for (std::size_t block = 0; block < blocks_.backings().size(); ++block) {
    store(static_cast<std::int32_t>(block));
  }
}

void GradientSpill::store(std::int32_t block) {
  const auto& parameters = blocks_.parameters_of(block);
  const auto gradient_of = [](const HostParameter* parameter) -> const at::Tensor& {
    return parameter->host.unsafeGetTensorImpl()->grad();
  };
  if (std::none_of(parameters.begin(), parameters.end(),
                   [&](const HostParameter* parameter) { return parameter->lent(gradient_of(parameter)); })) {
    return;
  }
  sink_.bring_home(parameters);
  sink_.norm().finish();
  sink_.between_gradients([&] {
    std::vector<at::Tensor> gradients;
    for (const HostParameter* parameter : parameters) {
      // A gradient whose memory has another owner, such as a numpy array, stays on the host.
      const std::size_t known = sink_.norm().holds(*parameter) ? 2 : 1;
      if (parameter->lent(gradient_of(parameter)) && gradient_of(parameter).storage().use_count() <= known) {
        gradients.push_back(gradient_of(parameter));
      }
    }
    disk_.homes()->store_gradients(block, gradients, blocks_.owner(), backlog_);
  });
}

}  // namespace hydra
