#include "csrc/plan/step_simulation.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace hydra {

namespace {

double again_seconds(const ActivationSegment& segment, ActivationOption option) {
  if (!runs_again(option)) {
    return 0;
  }
  return segment.freedom.second ? segment.freedom.second->seconds : segment.forward_seconds;
}

/// What a second forward saves.
Bytes again_bytes(const ActivationSegment& segment, ActivationOption option) {
  if (!runs_again(option)) {
    return 0;
  }
  return segment.freedom.second ? segment.freedom.second->bytes : std::max(segment.saved.fresh, segment.saved.all);
}

/// Bytes that take room until a moment. The moments of later ones are not earlier.
class BytesInFlight {
 public:
  void add(double until, Bytes bytes) {
    entries_.emplace_back(until, bytes);
    bytes_ += bytes;
  }

  Bytes bytes() const { return bytes_; }

  /// The first moment from `now` on with at most `room` bytes in flight. Bytes that are gone by then are not counted
  /// any more: later calls ask for later moments.
  double wait(double now, Bytes room) {
    while (first_ < entries_.size() && (bytes_ > room || entries_[first_].first <= now)) {
      now = std::max(now, entries_[first_].first);
      bytes_ -= entries_[first_].second;
      ++first_;
    }
    return now;
  }

 private:
  std::vector<std::pair<double, Bytes>> entries_;
  std::size_t first_ = 0;
  Bytes bytes_ = 0;
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
        stash_(treatment.stash_bytes),
        in_rounds_(treatment.round_size > 1),
        resident_(segments.size(), 0) {
    visits_.reserve(segments.size());
    Bytes kept = treatment.stash_bytes;
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
      visits_.push_back({machine.budget - kept - needed_bytes(segment, option, treatment.round_size), moved,
                         segment.forward_seconds + coding, segment.backward_seconds + again + coding,
                         static_cast<double>(moved) / machine.to_host + disk,
                         static_cast<double>(moved) / machine.to_device + disk});
      kept += treatment.round_size * kept_bytes(segment, option);
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
    const double before = std::exchange(entered_, now_);
    const Bytes here = std::min(std::exchange(resident_[i], 0), room + slot);
    coming_.bytes -= here;
    shrink(coming_, room + slot - std::max(here, slot));
    const Bytes stays = std::min(segment.weight_bytes, room + slot - coming_.bytes);
    shrink(passed_, room + slot - coming_.bytes - stays);
    const Bytes lacking = segment.weight_bytes - here;
    if (lacking > 0) {
      // Beside the segment before it, if both have room.
      to_device_ = std::max(to_device_, room - coming_.bytes >= segment.weight_bytes ? before : now_);
      bring(StepWorkKind::kBringWeights, i, lacking, static_cast<double>(lacking) / machine_.to_device);
      now_ = std::max(now_, to_device_);
    }
    resident_[i] = stays;
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
    const bool has_stash = visit.moved > 0 && visit.moved <= stash_;
    now_ = has_stash ? leaving_.wait(now_, stash_ - visit.moved) : now_;
    const double begin = now_;
    now_ += visit.forward_seconds;
    note(StepWorkKind::kForward, i, begin, now_);
    if (visit.moved == 0) {
      return;
    }
    step_.to_host_seconds += visit.sending_seconds;
    const double sending = std::max(to_host_, has_stash ? begin : now_);
    // What is saved last leaves after forward.
    to_host_ = std::max(sending + visit.sending_seconds, now_);
    note(StepWorkKind::kSendStash, i, std::max(sending, to_host_ - visit.sending_seconds), to_host_, visit.moved);
    if (has_stash) {
      leaving_.add(to_host_, visit.moved);
    } else {
      now_ = to_host_;
    }
  }

  void backward(std::size_t i) {
    const Visit& visit = visits_[i];
    step_.compute_seconds += visit.backward_seconds;
    if (visit.moved > 0) {
      if (visit.moved > stash_) {
        to_device_ = std::max(to_device_, now_);
      } else {
        to_device_ = ahead_.wait(std::max(to_device_, turned_), stash_ - visit.moved);
        to_device_ = leaving_.wait(to_device_, stash_ - visit.moved - ahead_.bytes());
      }
      bring(StepWorkKind::kBringStash, i, visit.moved, visit.bringing_seconds);
      now_ = std::max(now_, to_device_);
    }
    const double begin = now_;
    now_ += visit.backward_seconds;
    note_backward(i, begin);
    if (visit.moved > 0 && visit.moved <= stash_) {
      ahead_.add(now_, visit.moved);
    }
  }

  void send_gradients(std::size_t i) {
    const Bytes bytes = segments_[i].gradients.all;
    if (bytes > 0) {
      const double seconds = static_cast<double>(bytes) / machine_.to_host;
      const double begin = std::max(to_host_, now_);
      to_host_ = begin + seconds;
      step_.to_host_seconds += seconds;
      note(StepWorkKind::kSendGradients, i, begin, to_host_, bytes);
      gradients_.add(to_host_, bytes);
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
  const Bytes stash_;
  const bool in_rounds_;
  std::vector<Visit> visits_;
  std::vector<Bytes> resident_;  // weights that stay
  Staying coming_;               // of segments that this pass will come to
  Staying passed_;               // of those that it has left
  double now_ = 0;               // when compute is free
  double to_device_ = 0;         // when the lane is free
  double to_host_ = 0;
  double entered_ = 0;  // when the present segment began
  double turned_ = 0;   // when the round's backward began
  BytesInFlight leaving_;
  BytesInFlight ahead_;
  BytesInFlight gradients_;
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

Bytes peak_bytes(const std::vector<ActivationSegment>& segments, const ActivationTreatment& treatment) {
  Bytes kept = treatment.stash_bytes;
  Bytes peak = 0;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    peak = std::max(peak, kept + needed_bytes(segments[i], treatment.options[i], treatment.round_size));
    kept += treatment.round_size * kept_bytes(segments[i], treatment.options[i]);
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
  double forward = 0;
  for (const ActivationSegment& segment : segments) {
    forward += microbatches * segment.forward_seconds;
  }
  const double end = step.seconds + std::max(0.0, machine.update_seconds - forward);
  if (record != nullptr && end > step.seconds) {
    record->work.push_back({StepWorkKind::kUpdate, std::nullopt, step.seconds, end, 0});
  }
  step.seconds = end;
  return step;
}

}  // namespace hydra
