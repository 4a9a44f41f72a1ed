#include "csrc/schedule/stream.h"

#include <string>
#include <utility>

#include "csrc/base/errors.h"
#include "csrc/schedule/communication.h"

namespace hydra::schedule {

namespace {

/// Adds the begins of updates and the communication that the schedule leaves out.
Actions completed(const Schedule& schedule, UpdatePlacer& placer, Actions actions) {
  if (!schedule.begins_updates()) {
    actions = placer.place(actions);
  }
  return schedule.communicates() ? actions : add_communication(schedule, actions);
}

void append(Actions& all, const Actions& more) { all.insert(all.end(), more.begin(), more.end()); }

}  // namespace

BodyReader::BodyReader(const Schedule& schedule, int rank, std::int64_t first_batch)
    : body_(schedule.body(rank)),
      microbatches_(schedule.microbatches()),
      steps_behind_(schedule.steps_behind()),
      first_(first_batch),
      batches_(first_batch) {}

void BodyReader::read(std::int64_t step, std::int64_t end, Actions& actions) const {
  for (Action action : body_) {
    action.batch += step;
    if (action.batch >= first_ && action.batch < end) {
      actions.push_back(action);
    }
  }
}

Actions BodyReader::next_batch(int microbatches) {
  HYDRA_EXPECT(microbatches == microbatches_, InvalidSchedule,
               "a batch of " + std::to_string(microbatches) + " microbatches for a schedule that is written for " +
                   std::to_string(microbatches_) + "; give every batch that many");
  Actions actions;
  read(batches_, batches_ + 1, actions);
  ++batches_;
  return actions;
}

Actions BodyReader::drain() {
  Actions actions;
  for (std::int64_t step = batches_; step < batches_ + steps_behind_; ++step) {
    read(step, batches_, actions);
  }
  first_ = batches_;
  return actions;
}

Stream::Stream(const Schedule& schedule, int rank, std::int64_t first_batch)
    : schedule_(schedule), rank_(rank), reader_(schedule, rank, first_batch), placer_(schedule, rank, first_batch) {
  HYDRA_EXPECT(first_batch >= 0, InvalidSchedule, "first_batch=" + std::to_string(first_batch) + "; give 0 or more");
  if (schedule.recipe()) {
    generator_.emplace(*schedule.recipe(), rank, first_batch);
  }
}

Actions Stream::next_batch(int microbatches) {
  return completed(schedule_, placer_,
                   generator_ ? generator_->next_batch(microbatches) : reader_.next_batch(microbatches));
}

Actions Stream::drain() { return completed(schedule_, placer_, generator_ ? generator_->drain() : reader_.drain()); }

Actions Stream::evaluation(std::int64_t batch, int microbatches) const {
  HYDRA_EXPECT(batch < 0 && microbatches >= 1 && microbatches <= kMostMicrobatches, InvalidSchedule,
               "an evaluation as batch " + std::to_string(batch) + " of " + std::to_string(microbatches) +
                   " microbatches; give a number below 0, and 1 to " + std::to_string(kMostMicrobatches));
  Actions forwards;
  for (const int stage : schedule_.stages_of(rank_)) {
    for (int microbatch = 0; microbatch < microbatches; ++microbatch) {
      forwards.push_back({ActionKind::kForward, stage, batch, microbatch});
    }
  }
  return add_communication(schedule_, forwards);
}

std::int64_t Stream::batches() const noexcept { return generator_ ? generator_->batches() : reader_.batches(); }

std::vector<Actions> unroll(const Schedule& schedule, int batches) {
  HYDRA_EXPECT(batches >= 1, InvalidSchedule, std::to_string(batches) + " batches were asked for; give at least 1");
  std::vector<Actions> ranks;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    BodyReader reader(schedule, rank, 0);
    UpdatePlacer placer(schedule, rank, 0);
    Actions& actions = ranks.emplace_back();
    for (int batch = 0; batch < batches; ++batch) {
      append(actions, completed(schedule, placer, reader.next_batch(schedule.microbatches())));
    }
    append(actions, completed(schedule, placer, reader.drain()));
  }
  return ranks;
}

Schedule written_out(const Schedule& schedule) {
  // From this step on no batch lies before the first, and no update begins elsewhere because its batch is the first.
  const int steady = schedule.steps_behind() + 1;
  std::vector<Actions> bodies(index(schedule.ranks()));
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    BodyReader reader(schedule, rank, 0);
    UpdatePlacer placer(schedule, rank, 0);
    Actions& body = bodies[index(rank)];
    while (reader.batches() <= steady) {
      body = completed(schedule, placer, reader.next_batch(schedule.microbatches()));
    }
    for (Action& action : body) {
      action.batch -= steady;
    }
  }
  return Schedule(schedule.stages(), schedule.microbatches(), schedule.rule(), std::move(bodies));
}

}  // namespace hydra::schedule
