#include "csrc/pytorch/model/round_stay.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "csrc/pytorch/memory/counting_allocator.h"

namespace hydra {

namespace {

BlockList without(const BlockList& blocks, const BlockList& others) {
  BlockList rest;
  std::copy_if(blocks.begin(), blocks.end(), std::back_inserter(rest),
               [&](std::int32_t block) { return std::find(others.begin(), others.end(), block) == others.end(); });
  return rest;
}

}  // namespace

void RoundStay::stay_in(const BlockList& blocks, PassKind kind) {
  Bytes leaving = 0;
  if (kind == PassKind::kBackward) {
    leaving = gradients_.gathering().end([this](HostParameter& parameter, at::Tensor gradient) {
      gradients_.hand_over(parameter, std::move(gradient));
    });
  } else {
    gradients_.gathering().carry();
  }
  gradients_.sink().norm().release();
  const BlockList before = stays();
  const BlockList left = without(before, blocks);
  const BlockList reached = without(blocks, before);
  exchange(stays_, without(before, left));
  leave_backward();
  arrivals_.leave(left);
  if (kind == PassKind::kBackward) {
    gradients_.spill().note_left(left);
  }
  arrivals_.arrive(reached, kind);
  exchange(stays_, blocks);
  if (!blocks.empty()) {
    pager_.passes().note_leaving(leaving);
  }
  if (kind == PassKind::kBackward && !blocks.empty()) {
    gradients_.begin_gathering();
  }
}

bool RoundStay::includes(const BlockList& blocks) const {
  const BlockList all = stays();
  return !all.empty() && without(blocks, all).empty();
}

void RoundStay::drop_copies() { arrivals_.drop_copies(stays()); }

void RoundStay::arrive_backward(const BlockList& blocks) {
  if (gate_.closed() || includes(blocks)) {
    return;
  }
  if (gate_.open()) {
    exchange_thread_charge({.account = memory_.charged()});  // one backward may run through several models
  }
  gradients_.sink().norm().release();
  gradients_.spill().note_left(leave_backward());
  arrivals_.arrive(blocks, PassKind::kBackward);
  leave_backward(blocks);  // another thread may have reached others meanwhile
}

void RoundStay::note_summed(const HostParameter& parameter) {
  const std::int32_t block = parameter.page->block;
  {
    const std::lock_guard lock(mutex_);
    if (summing_.backward != torch::autograd::get_current_graph_task_id()) {
      return;
    }
    const auto found = std::find_if(summing_.blocks.begin(), summing_.blocks.end(),
                                    [&](const auto& pinned) { return pinned.first == block; });
    if (found == summing_.blocks.end() || found->second < 0 || --found->second > 0) {
      return;
    }
    summing_.blocks.erase(found);
  }
  arrivals_.leave(block);
}

BlockList RoundStay::leave_backward(const BlockList& reached) {
  Summing summed = summing(reached);
  BlockList left = exchange(backward_, reached);
  {
    const std::lock_guard lock(mutex_);
    std::swap(summing_, summed);
  }
  for (const auto& [block, to_come] : summed.blocks) {
    arrivals_.leave(block);
  }
  return left;
}

RoundStay::Summing RoundStay::summing(const BlockList& blocks) const {
  Summing found{.backward = torch::autograd::get_current_graph_task_id(), .blocks = {}};
  for (const std::int32_t block : blocks) {
    const std::vector<HostParameter*>& parameters = blocks_.parameters_of(block);
    const bool all =
        std::ranges::all_of(parameters, [](const HostParameter* each) { return each->face.requires_grad(); });
    found.blocks.emplace_back(block, all && !parameters.empty() ? static_cast<int>(parameters.size()) : -1);
  }
  return found;
}

void RoundStay::end() noexcept {
  leave_backward();
  gradients_.gathering().discard();
  arrivals_.leave(exchange(stays_, {}));
}

BlockList RoundStay::stays() const {
  const std::lock_guard lock(mutex_);
  return stays_.blocks;
}

BlockList RoundStay::exchange(Reached& reached, BlockList next) noexcept {
  const std::lock_guard lock(mutex_);
  arrivals_.timeline().note_compute(reached.blocks, reached.begin);
  reached.begin = memory_.backend().activity().now();
  return std::exchange(reached.blocks, std::move(next));
}

}  // namespace hydra
