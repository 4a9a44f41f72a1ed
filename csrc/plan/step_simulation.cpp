#include "csrc/plan/step_simulation.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

namespace hydra {

namespace {

constexpr double kNoMoment = std::numeric_limits<double>::infinity();

double again_seconds(const ActivationSegment& segment, ActivationOption option) {
  if (!runs_again(option)) {
    return 0;
  }
  return segment.freedom.second ? segment.freedom.second->seconds : segment.forward_seconds;
}

/// Of the seconds that bytes take, those of what has no room.
double seconds_without_room(double seconds, Bytes bytes, Bytes room) {
  return room >= bytes ? 0 : seconds * (1 - static_cast<double>(room) / static_cast<double>(bytes));
}

/// What a second forward saves.
Bytes again_bytes(const ActivationSegment& segment, ActivationOption option) {
  if (!runs_again(option)) {
    return 0;
  }
  return segment.freedom.second ? segment.freedom.second->bytes : std::max(segment.saved.fresh, segment.saved.all);
}

/// The most in use while a segment runs. `kept`: by the segments until each one.
Bytes needed_at(const std::vector<ActivationSegment>& segments, const ActivationTreatment& treatment,
                const std::vector<Bytes>& kept, std::size_t i) {
  const ActivationOption option = treatment.options[i];
  return treatment.stash_bytes + needed_bytes(segments[i], option, treatment.round_size) +
         treatment.round_size * (kept[i] - kept_bytes(segments[i], option));
}

/// Bytes that take room for a while. What is added later goes later.
class BytesInFlight {
 public:
  /// They go evenly from `begin` to `end`.
  void add(double begin, double end, Bytes bytes) {
    entries_.push_back({begin, end, bytes});
    bytes_ += bytes;
  }

  /// The first moment from `now` on with at most `room` bytes in flight. Later calls ask for later moments.
  double wait(double now, Bytes room) {
    drop(now);
    while (bytes_ > room && first_ < entries_.size()) {
      const auto [begin, end, bytes] = entries_[first_];
      const Bytes excess = bytes_ - room;
      if (excess < bytes) {
        return std::max(now, begin + (end - begin) * static_cast<double>(excess) / static_cast<double>(bytes));
      }
      now = end;
      drop(now);
    }
    return now;
  }

  /// At most so many are in flight from `now` on. Later calls ask for later moments.
  Bytes from(double now) {
    drop(now);
    return bytes_;
  }

  /// The moment at which the first of them have gone; infinite if there are none.
  double next() const { return first_ < entries_.size() ? entries_[first_].end : kNoMoment; }

 private:
  struct Entry {
    double begin;
    double end;
    Bytes bytes;
  };

  void drop(double now) {
    for (; first_ < entries_.size() && entries_[first_].end <= now; ++first_) {
      bytes_ -= entries_[first_].bytes;
    }
  }

  std::vector<Entry> entries_;
  std::size_t first_ = 0;
  Bytes bytes_ = 0;
};

/// The least room from a moment to now, of stays that follow each other.
class LeastRoom {
 public:
  void clear() {
    stays_.clear();
    first_ = 0;
  }

  void add(double begin, Bytes room) {
    while (stays_.size() > first_ && stays_.back().room >= room) {
      begin = stays_.back().begin;
      stays_.pop_back();
    }
    stays_.push_back({begin, room});
  }

  /// The first moment from `moment` on with room for bytes; infinite if there is none yet. Later calls likewise.
  double first(double moment, Bytes bytes) {
    while (!stays_.empty() && from(moment) < bytes) {
      if (next() == kNoMoment) {
        return kNoMoment;
      }
      moment = next();
    }
    return stays_.empty() ? kNoMoment : moment;
  }

  /// The least room from `moment` on. Later calls ask for later moments.
  Bytes from(double moment) {
    while (first_ + 1 < stays_.size() && stays_[first_ + 1].begin <= moment) {
      ++first_;
    }
    return stays_[first_].room;
  }

  /// The moment of the last answer's next change; infinite if it was the last stay's.
  double next() const { return first_ + 1 < stays_.size() ? stays_[first_ + 1].begin : kNoMoment; }

 private:
  struct Stay {
    double begin;
    Bytes room;  // the least from here on
  };

  std::vector<Stay> stays_;
  std::size_t first_ = 0;
};

/// One step, stay by stay. A stay is the time of a round in a segment, forward or backward.
class StepRun {
 public:
  StepRun(const std::vector<ActivationSegment>& segments, const ActivationMachine& machine,
          const ActivationTreatment& treatment, StepRecord* record)
      : segments_(segments),
        machine_(machine),
        treatment_(treatment),
        record_(record),
        in_rounds_(treatment.round_size > 1),
        resident_(segments.size(), 0) {
    visits_.reserve(segments.size());
    const std::vector<Bytes> kept = kept_until(segments, treatment.options);
    Bytes off_device = 0;
    for (std::size_t i = 0; i < segments.size(); ++i) {
      const ActivationSegment& segment = segments[i];
      const ActivationOption option = treatment.options[i];
      const Bytes moved = moved_bytes(segment, option);
      const Bytes of_round = treatment.round_size * moved;
      off_device += of_round;
      const Bytes on_disk = std::clamp<Bytes>(off_device - machine.host_bytes, 0, of_round);
      const double disk = on_disk > 0 ? static_cast<double>(on_disk) / treatment.round_size / machine.disk : 0;
      const double coding = option == ActivationOption::kCompress ? segment.coding->seconds / 2 : 0;
      const double again = again_seconds(segment, option);
      visits_.push_back({machine.budget - needed_at(segments, treatment, kept, i), moved,
                         segment.forward_seconds + coding, segment.backward_seconds + again + coding,
                         static_cast<double>(moved) / machine.to_host + disk,
                         static_cast<double>(moved) / machine.to_device + disk});
      visits_.back().unkept = treatment.round_size * (kept.back() - kept[i]);
    }
  }

  void round(int microbatches, bool is_last) {
    turn(Way::kForward);
    for (std::size_t i = 0; i < segments_.size(); ++i) {
      enter(i);
      for (int n = 0; n < microbatches; ++n) {
        forward(i);
      }
      passed_.bytes += resident_[i];
    }
    turned_ = now_;
    ahead_room_.clear();
    turn(Way::kBackward);
    for (std::size_t i = segments_.size(); i-- > 0;) {
      enter(i);
      for (int n = 0; n < microbatches; ++n) {
        backward(i);
      }
      resident_[i] = is_last ? 0 : resident_[i];  // not used again
      passed_.bytes += resident_[i];
      send_gradients(i);
    }
  }

  SimulatedStep result() const {
    SimulatedStep step = step_;
    step.seconds = std::max(now_, to_host_);
    return step;
  }

 private:
  enum class Way { kForward, kBackward };

  /// One microbatch in a segment.
  struct Visit {
    Bytes room;   // beside what the segment needs
    Bytes moved;  // through the stash
    double forward_seconds;
    double backward_seconds;
    double sending_seconds;
    double bringing_seconds;
    Bytes unkept = 0;  // that later segments keep: not there yet in forward, gone in backward
  };

  /// Weights that stay, of segments that are used one after another.
  struct Staying {
    Bytes bytes = 0;
    std::size_t last_used = 0;  // segment with weights that are used last, or one after it
    bool upwards = false;       // the one that is used before it has a higher number
  };

  /// Brings the weights of the pass's next segment. Those of segments that have passed are used after these, the others
  /// before.
  void enter(std::size_t i) {
    const ActivationSegment& segment = segments_[i];
    const Bytes slot = in_rounds_ ? segment.weight_bytes : std::min(segment.slot_bytes, segment.weight_bytes);
    const Bytes room = std::max<Bytes>(visits_[i].room, 0);  // beside the slot
    if (record_ != nullptr) {
      record_->stays.push_back(now_);
    }
    now_ = gradients_.wait(now_, room);
    const double entered = now_;
    const Bytes here = std::min(std::exchange(resident_[i], 0), room + slot);
    coming_.bytes -= here;
    shrink(coming_, room + slot - std::max(here, slot));
    const Bytes stays = std::min(segment.weight_bytes, room + slot - coming_.bytes);
    shrink(passed_, room + slot - coming_.bytes - stays);
    const Bytes lacking = segment.weight_bytes - here;
    if (lacking > 0) {
      // Ahead, as soon as there is room for them. Weights that stay until then make way if they are used later.
      to_device_ = std::max(to_device_, std::min(weight_room_.first(to_device_, lacking), now_));
      bring(StepWorkKind::kBringWeights, i, lacking, static_cast<double>(lacking) / machine_.to_device);
      now_ = std::max(now_, to_device_);
    }
    resident_[i] = stays;
    const Bytes weights = coming_.bytes + passed_.bytes + std::max(stays, slot);
    free_ = treatment_.stash_bytes + std::max<Bytes>(room + slot - weights, 0);
    on_their_way_ = std::min(free_, treatment_.stash_bytes + visits_[i].unkept);
    weight_room_.add(entered, room + slot - std::max(stays, slot));
    ahead_room_.add(entered, on_their_way_);
  }

  /// Drops those that are used last, in part if that is enough.
  void shrink(Staying& staying, Bytes room) {
    while (staying.bytes > room) {
      Bytes& bytes = resident_[staying.last_used];
      const Bytes dropped = std::min(bytes, staying.bytes - room);
      bytes -= dropped;
      staying.bytes -= dropped;
      if (bytes == 0) {
        staying.last_used = staying.upwards ? staying.last_used + 1 : staying.last_used - 1;
      }
    }
  }

  /// Starts a pass in which segments are used in the order opposite to that of the pass before.
  void turn(Way way) {
    const std::size_t last = segments_.size() - 1;
    coming_ = {passed_.bytes, way == Way::kForward ? last : 0, way == Way::kBackward};
    passed_ = {0, way == Way::kForward ? 0 : last, way == Way::kForward};
  }

  void forward(std::size_t i) {
    const Visit& visit = visits_[i];
    step_.compute_seconds += visit.forward_seconds;
    now_ = leaving_.wait(now_, on_their_way_);
    const double begin = now_;
    now_ += visit.forward_seconds;
    note(StepWorkKind::kForward, i, begin, now_);
    if (visit.moved == 0) {
      return;
    }
    step_.to_host_seconds += visit.sending_seconds;
    // What is saved leaves while the segment goes on, as far as there is room. The last of it leaves after forward.
    const double after = seconds_without_room(visit.sending_seconds, visit.moved, free_);
    const double sent = std::max(std::max(to_host_, begin) + visit.sending_seconds, std::max(to_host_, now_) + after);
    const double sending = std::max(to_host_, sent - visit.sending_seconds);
    note(StepWorkKind::kSendStash, i, sending, sent, visit.moved);
    leaving_.add(sending, sent, visit.moved);
    to_host_ = sent;
    now_ = leaving_.wait(now_ + after, on_their_way_);
  }

  void backward(std::size_t i) {
    const Visit& visit = visits_[i];
    step_.compute_seconds += visit.backward_seconds;
    double ahead = 0;
    if (visit.moved > 0) {
      const auto [bytes, moment] = come_ahead(visit);
      ahead = bytes;
      // What had no room comes when it is read.
      const double late = visit.bringing_seconds * (1 - ahead / static_cast<double>(visit.moved));
      to_device_ = std::max(to_device_, moment + late - visit.bringing_seconds);
      bring(StepWorkKind::kBringStash, i, visit.moved, visit.bringing_seconds);
      now_ = std::max(now_, to_device_);
    }
    const double begin = now_;
    now_ += visit.backward_seconds;
    note_backward(i, begin);
    ahead_.add(now_, now_, static_cast<Bytes>(ahead));
  }

  /// How many of its bytes come before it reads them, as room grows since backward began, and the moment when they
  /// have.
  std::pair<double, double> come_ahead(const Visit& visit) {
    const auto moved = static_cast<double>(visit.moved);
    double come = 0;
    double moment = std::max(to_device_, turned_);
    while (moment < now_ && come < moved) {
      const Bytes free = ahead_room_.from(moment) - ahead_.from(moment) - leaving_.from(moment);
      const double end = std::min({now_, ahead_room_.next(), ahead_.next(), leaving_.next()});
      const double more = std::max(0.0, std::min(moved, static_cast<double>(free)) - come);
      const double seconds = visit.bringing_seconds * (more / moved);
      if (moment + seconds > end) {
        come += more * (end - moment) / seconds;
        moment = end;
      } else {
        come += more;
        moment = come < moved ? end : moment + seconds;
      }
    }
    return {come, std::max(moment, come < moved ? now_ : 0.0)};
  }

  void send_gradients(std::size_t i) {
    const Bytes bytes = segments_[i].gradients.all;
    if (bytes > 0) {
      const double seconds = static_cast<double>(bytes) / machine_.to_host;
      const double begin = std::max(to_host_, now_);
      to_host_ = begin + seconds;
      step_.to_host_seconds += seconds;
      note(StepWorkKind::kSendGradients, i, begin, to_host_, bytes);
      gradients_.add(to_host_, to_host_, bytes);
    }
  }

  void bring(StepWorkKind kind, std::size_t i, Bytes bytes, double seconds) {
    const double begin = to_device_;
    to_device_ += seconds;
    step_.to_device_seconds += seconds;
    note(kind, i, begin, to_device_, bytes);
  }

  void note_backward(std::size_t i, double begin) {
    if (record_ != nullptr) {
      const double again = again_seconds(segments_[i], treatment_.options[i]);
      const double backward = begin + again;
      if (again > 0) {
        note(StepWorkKind::kRecompute, i, begin, backward);
      }
      note(StepWorkKind::kBackward, i, backward, now_);
    }
  }

  void note(StepWorkKind kind, std::size_t i, double begin, double end, Bytes bytes = 0) {
    if (record_ != nullptr) {
      record_->work.push_back({kind, i, begin, end, bytes});
    }
  }

  const std::vector<ActivationSegment>& segments_;
  const ActivationMachine& machine_;
  const ActivationTreatment& treatment_;
  StepRecord* const record_;  // null: none
  const bool in_rounds_;
  std::vector<Visit> visits_;
  std::vector<Bytes> resident_;  // weights that stay
  Staying coming_;               // of segments that this pass will come to
  Staying passed_;               // of those that it has left
  double now_ = 0;               // when compute is free
  double to_device_ = 0;         // when the lane is free
  double to_host_ = 0;
  double turned_ = 0;       // when the round's backward began
  Bytes free_ = 0;          // in the present segment, beside weights that stay
  Bytes on_their_way_ = 0;  // of this, for what leaves or comes from one segment to another
  BytesInFlight leaving_;
  BytesInFlight ahead_;
  BytesInFlight gradients_;
  LeastRoom ahead_room_;   // for what was saved, since backward began
  LeastRoom weight_room_;  // for weights, beside that
  SimulatedStep step_;
};

}  // namespace

Bytes kept_bytes(const ActivationSegment& segment, ActivationOption option) {
  switch (option) {
    case ActivationOption::kKeep:
      return std::max(segment.saved.fresh, segment.saved.all);
    case ActivationOption::kRecompute:
      return std::max(segment.inputs.fresh, segment.inputs.all);
    default:
      return 0;
  }
}

Bytes moved_bytes(const ActivationSegment& segment, ActivationOption option) {
  switch (option) {
    case ActivationOption::kOffload:
      return segment.saved.fresh;
    case ActivationOption::kCompress:
      return segment.coding->stream_bytes;
    case ActivationOption::kRecomputeOffloaded:
      return segment.inputs.fresh;
    default:
      return 0;
  }
}

double compute_seconds(const ActivationSegment& segment, ActivationOption option) {
  double seconds = segment.forward_seconds + segment.backward_seconds;
  seconds += again_seconds(segment, option);
  return seconds + (option == ActivationOption::kCompress ? segment.coding->seconds : 0);
}

Bytes needed_bytes(const ActivationSegment& segment, ActivationOption option, int round_size) {
  const bool in_rounds = round_size > 1;
  const Bytes gradients = in_rounds ? std::max(segment.gradients.all, segment.gradients.live) : segment.gradients.live;
  const bool runs_twice = runs_again(option);
  const Bytes in_use = runs_twice ? std::max(segment.forward_bytes, segment.backward_bytes) : segment.backward_bytes;
  return round_size * kept_bytes(segment, option) + (round_size - 1) * segment.parked_bytes +
         (in_rounds ? segment.weight_bytes : segment.slot_bytes) +
         std::max(segment.forward_bytes, in_use + gradients + again_bytes(segment, option));
}

std::vector<Bytes> kept_until(const std::vector<ActivationSegment>& segments,
                              const std::vector<ActivationOption>& options) {
  std::vector<Bytes> kept;
  kept.reserve(segments.size());
  Bytes so_far = 0;
  Bytes most = segments.empty() ? 0 : segments.back().saved.fresh;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    most += i + 1 < segments.size() ? segments[i].saved.fresh : 0;
    most += options[i] == ActivationOption::kRecompute ? kept_bytes(segments[i], options[i]) : 0;
    so_far = std::min(so_far + kept_bytes(segments[i], options[i]), most);
    kept.push_back(so_far);
  }
  return kept;
}

Bytes peak_bytes(const std::vector<ActivationSegment>& segments, const ActivationTreatment& treatment) {
  const std::vector<Bytes> kept = kept_until(segments, treatment.options);
  Bytes peak = 0;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    peak = std::max(peak, needed_at(segments, treatment, kept, i));
  }
  return peak;
}

Bytes host_bytes(const std::vector<ActivationSegment>& segments, const ActivationTreatment& treatment) {
  Bytes moved = 0;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    moved += treatment.round_size * moved_bytes(segments[i], treatment.options[i]);
  }
  return moved;
}

bool fits_host(const std::vector<ActivationSegment>& segments, const ActivationTreatment& treatment,
               const ActivationMachine& machine) {
  return machine.disk > 0 || host_bytes(segments, treatment) <= machine.host_bytes;
}

SimulatedStep simulate_step(const std::vector<ActivationSegment>& segments, const ActivationMachine& machine,
                            int microbatches, const ActivationTreatment& treatment, StepRecord* record) {
  StepRun run(segments, machine, treatment, record);
  for (int left = microbatches; left > 0; left -= treatment.round_size) {
    run.round(std::min(left, treatment.round_size), left <= treatment.round_size);
  }
  SimulatedStep step = run.result();
  double forward = 0;  // of the next step's first round, which reads every weight
  for (const ActivationSegment& segment : segments) {
    forward += std::min(microbatches, treatment.round_size) * segment.forward_seconds;
  }
  const double end = step.seconds + std::max(0.0, machine.update_seconds - forward);
  if (record != nullptr && end > step.seconds) {
    record->work.push_back({StepWorkKind::kUpdate, std::nullopt, step.seconds, end, 0});
  }
  step.seconds = end;
  return step;
}

}  // namespace hydra
