#include "csrc/schedule/update_placer.h"

#include <algorithm>

namespace hydra::schedule {

UpdatePlacer::UpdatePlacer(const Schedule& schedule, int rank, std::int64_t first_batch) {
  for (const int number : schedule.stages_of(rank)) {
    stages_.push_back({number, schedule.buffers(number) == 1, first_batch, first_batch, first_batch});
  }
}

Actions UpdatePlacer::place(const Actions& actions) {
  Actions placed;
  for (const Action& action : actions) {
    if (action.kind == ActionKind::kFinishUpdate) {
      Stage& updated = stage(action.stage);
      if (updated.in_place && updated.updated == action.batch && may_begin(updated, reduced())) {
        begin(updated, placed);
      }
      placed.push_back(action);
      updated.updated = action.batch + 1;
      begin_beside(placed);
    } else {
      placed.push_back(action);
      if (action.kind == ActionKind::kReduce) {
        stage(action.stage).reduced = action.batch + 1;
        begin_beside(placed);
      }
    }
  }
  return placed;
}

std::int64_t UpdatePlacer::reduced() const { return std::ranges::min_element(stages_, {}, &Stage::reduced)->reduced; }

bool UpdatePlacer::may_begin(const Stage& stage, std::int64_t reduced) {
  return stage.begun == stage.updated && stage.updated < reduced;
}

void UpdatePlacer::begin(Stage& stage, Actions& placed) {
  placed.push_back({ActionKind::kBeginUpdate, stage.number, stage.begun, 0});
  ++stage.begun;
}

void UpdatePlacer::begin_beside(Actions& placed) {
  const std::int64_t behind = reduced();
  for (Stage& each : stages_) {
    if (!each.in_place && may_begin(each, behind)) {
      begin(each, placed);
    }
  }
}

UpdatePlacer::Stage& UpdatePlacer::stage(int number) { return *std::ranges::find(stages_, number, &Stage::number); }

}  // namespace hydra::schedule
