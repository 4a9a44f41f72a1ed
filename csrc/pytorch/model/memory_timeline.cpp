#include "csrc/pytorch/model/memory_timeline.h"

namespace hydra {

void MemoryTimeline::begin_pass(PassKind kind) noexcept {
  pass_ = kind;
  memory_.backend().activity().begin_pass(kind);
  note_memory();
}

void MemoryTimeline::end_pass() noexcept {
  note_memory();
  memory_.backend().activity().end_pass();
}

void MemoryTimeline::note_arrival(std::int32_t block, PassKind kind) {
  {
    const std::lock_guard lock(mutex_);
    if (samples_.size() < room_) {
      MemorySample sample{kind, block, {}};
      const Ledger& ledger = memory_.ledger();
      for (std::size_t i = 0; i < kMemoryClasses; ++i) {
        sample.use.by_class[i] = ledger.in_use(static_cast<MemoryClass>(i));
        sample.use.total += sample.use.by_class[i];
      }
      samples_.push_back(sample);
    }
  }
  note_memory();
}

void MemoryTimeline::note_compute(const BlockList& blocks, Activity::Time begin) noexcept {
  for (const std::int32_t block : blocks) {
    memory_.backend().activity().add_since(begin, ActivityRow::kCompute, ActivityKind::kBlock, {.block = block});
  }
}

void MemoryTimeline::note_memory() noexcept {
  static_assert(MemoryMoment::kClasses == kMemoryClasses);
  ActivityLog& activity = memory_.backend().activity();
  MemoryMoment moment{.time = activity.now()};
  if (moment.time != Activity::Time{}) {
    for (std::size_t i = 0; i < kMemoryClasses; ++i) {
      moment.bytes[i] = memory_.ledger().in_use(static_cast<MemoryClass>(i));
    }
    activity.add(moment);
  }
}

void MemoryTimeline::record(std::size_t samples) {
  const std::lock_guard lock(mutex_);
  room_ = samples_.size() + samples;
  samples_.reserve(room_);
}

std::vector<MemorySample> MemoryTimeline::samples() const {
  const std::lock_guard lock(mutex_);
  return samples_;
}

std::string MemoryTimeline::explain() const {
  const std::int32_t block = block_;
  const std::string obstacle = obstacle_ ? obstacle_() : std::string();
  const char* pass = pass_ == PassKind::kBackward ? "backward" : "forward";
  return "While running " + std::string(pass) +
         (block < 0 ? std::string() : " of block '" + blocks_.name(block) + "'") + ", the device held " +
         memory_.describe() + "; in slots: " + pager_.describe_residents() + ". Raise the budget; " + remedies_ + "." +
         (obstacle.empty() ? obstacle : " " + obstacle + ".");
}

}  // namespace hydra
