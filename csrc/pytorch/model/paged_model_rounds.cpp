// What a paged model does for rounds: it stays in blocks while one microbatch after another runs through them.
#include <algorithm>

#include "csrc/pytorch/model/paged_model.h"

namespace hydra {

namespace {

BlockList without(const BlockList& blocks, const BlockList& others) {
  BlockList rest;
  std::copy_if(blocks.begin(), blocks.end(), std::back_inserter(rest),
               [&](std::int32_t block) { return std::find(others.begin(), others.end(), block) == others.end(); });
  return rest;
}

}  // namespace

void PagedModel::stay_in(const BlockList& blocks, PassKind kind) {
  Bytes leaving = 0;
  if (kind == PassKind::kBackward) {
    leaving = gathering_.end(
        [this](HostParameter& parameter, at::Tensor gradient) { hand_over(parameter, std::move(gradient)); });
  } else {
    gathering_.carry();
  }
  sink_->norm().release();
  const BlockList before = stays();
  const BlockList left = without(before, blocks);
  const BlockList reached = without(blocks, before);
  exchange_stays(without(before, left));
  leave(exchange_backward_blocks({}));
  leave(left);
  if (kind == PassKind::kBackward) {
    note_left(left);
  }
  arrive(reached, kind);
  exchange_stays(blocks);
  if (!blocks.empty()) {
    pager_->note_leaving(leaving);
  }
  if (kind == PassKind::kBackward && !blocks.empty() && !options_.gradient_dtype) {
    gathering_.begin();
  }
}

bool PagedModel::may_accumulate_early(const at::Tensor& leaf) const {
  const auto known = std::find_if(parameters_.begin(), parameters_.end(),
                                  [&](const auto& parameter) { return parameter->face.is_same(leaf); });
  return known != parameters_.end() && !options_.gradient_dtype && gathering_.would_keep(**known);
}

void PagedModel::drop_copies() {
  for (const std::int32_t block : stays()) {
    dropped_copies_ += derived_pages_.drop(block);
  }
}

bool PagedModel::stays_in(const BlockList& blocks) const {
  const BlockList all = stays();
  return !all.empty() && without(blocks, all).empty();
}

void PagedModel::end_stay() noexcept {
  gathering_.discard();
  leave(exchange_stays({}));
}

BlockList PagedModel::stays() const {
  const std::lock_guard lock(backward_mutex_);
  return stays_;
}

BlockList PagedModel::exchange_stays(BlockList next) {
  const std::lock_guard lock(backward_mutex_);
  note_compute(stays_, stays_begin_);
  stays_begin_ = backend_->activity().now();
  return std::exchange(stays_, std::move(next));
}

}  // namespace hydra
