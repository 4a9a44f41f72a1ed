#include "csrc/schedule/generator.h"

#include <algorithm>
#include <utility>

namespace hydra::schedule {

Generator::Generator(const Recipe& recipe, int rank, std::int64_t first_batch)
    : recipe_(recipe), rank_(rank), batches_(first_batch), next_update_(index(recipe.stages_per_rank()), first_batch) {}

Actions Generator::next_batch(int microbatches) {
  recipe_.check_batch(microbatches);
  microbatches_ = microbatches;
  admit(batches_, microbatches, true);
  ++batches_;
  return std::exchange(actions_, {});
}

Actions Generator::drain() {
  const auto unfinished = [&] { return std::ranges::min(next_update_) < batches_; };
  for (std::int64_t batch = batches_; unfinished(); ++batch) {
    admit(batch, microbatches_, false);
  }
  pending_.clear();
  open_.clear();
  in_flight_ = 0;
  return std::exchange(actions_, {});
}

void Generator::admit(std::int64_t batch, int microbatches, bool there) {
  const RankOrder order = recipe_.order(rank_, microbatches);
  open_.push_back({batch, std::vector<int>(next_update_.size(), there ? microbatches : 0)});
  for (const Turn& turn : order.backwards) {
    pending_.push_back({turn, batch, there && turn.microbatch < microbatches});
  }
  for (const Turn& turn : order.forwards) {
    if (recipe_.rule() == VersionRule::kDelayed) {
      finish(turn.stage, batch - 2);
    }
    if (there && turn.microbatch < microbatches) {
      emit(ActionKind::kForward, turn.stage, batch, turn.microbatch);
    }
    ++in_flight_;
    while (in_flight_ > order.in_flight) {
      run_backward();
    }
  }
  if (recipe_.flushes()) {
    while (!pending_.empty()) {
      run_backward();
    }
    for (int stage = recipe_.stages - recipe_.ranks + rank_; stage >= 0; stage -= recipe_.ranks) {
      update(stage, batch);
    }
  }
  const std::int64_t oldest = std::ranges::min(next_update_);
  while (!open_.empty() && open_.front().batch < oldest) {
    open_.pop_front();
  }
}

void Generator::run_backward() {
  const Pending backward = pending_.front();
  pending_.pop_front();
  --in_flight_;
  if (!backward.taken) {
    return;
  }
  const int stage = backward.turn.stage;
  emit(ActionKind::kBackward, stage, backward.batch, backward.turn.microbatch);
  if (--left(stage, backward.batch) == 0) {
    emit(ActionKind::kReduce, stage, backward.batch);
    if (recipe_.kind == RecipeKind::kPipedream) {
      update(stage, backward.batch);
    }
  }
}

void Generator::finish(int stage, std::int64_t batch) {
  while (next_update_[local(stage)] <= batch) {
    const std::int64_t next = next_update_[local(stage)];
    while (left(stage, next) > 0) {
      run_backward();
    }
    update(stage, next);
  }
}

void Generator::update(int stage, std::int64_t batch) {
  emit(ActionKind::kFinishUpdate, stage, batch);
  ++next_update_[local(stage)];
}

int& Generator::left(int stage, std::int64_t batch) {
  return open_[index(batch - open_.front().batch)].left[local(stage)];
}

void Generator::emit(ActionKind kind, int stage, std::int64_t batch, int microbatch) {
  actions_.push_back({kind, stage, batch, microbatch});
}

}  // namespace hydra::schedule
