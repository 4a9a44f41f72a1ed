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
  return segment.freedom.nested ? segment.freedom.nested->seconds : segment.forward_seconds;
}

/// What a second forward saves.
Bytes again_bytes(const ActivationSegment& segment, ActivationOption option) {
  if (!runs_again(option)) {
    return 0;
  }
  return segment.freedom.nested ? segment.freedom.nested->bytes : std::max(segment.saved.fresh, segment.saved.all);
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
          const ActivationTreatment& treatment)
      : segments_(segments),
        machine_(machine),
        stash_(treatment.stash_bytes),
        in_rounds_(treatment.round_size > 1),
        resident_(segments.size(), 0) {
    visits_.reserve(segments.size());
    Bytes kept = treatment.stash_bytes;
    for (std::size_t i = 0; i < segments.size(); ++i) {
      const ActivationSegment& segment = segments[i];
      const ActivationOption option = treatment.options[i];
      const Bytes moved = moved_bytes(segment, option);
      const double coding = option == ActivationOption::kCompress ? segment.coding->seconds / 2 : 0;
      const double again = again_seconds(segment, option);
      visits_.push_back({machine.budget - kept - needed_bytes(segment, option, treatment.round_size), moved,
                         segment.forward_seconds + coding, segment.backward_seconds + again + coding,
                         static_cast<double>(moved) / machine.to_host, static_cast<double>(moved) / machine.to_device});
      kept += treatment.round_size * kept_bytes(segment, option);
    }
  }

  void round(int microbatches, bool is_last) {
    turn(Way::kForward);
    for (std::size_t i = 0; i < segments_.size(); ++i) {
      enter(i);
      for (int n = 0; n < microbatches; ++n) {
        forward(visits_[i]);
      }
      passed_.bytes += resident_[i];
    }
    turned_ = now_;
    turn(Way::kBackward);
    for (std::size_t i = segments_.size(); i-- > 0;) {
      enter(i);
      for (int n = 0; n < microbatches; ++n) {
        backward(visits_[i]);
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
      bring(static_cast<double>(lacking) / machine_.to_device);
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

  void forward(const Visit& visit) {
    step_.compute_seconds += visit.forward_seconds;
    if (visit.moved == 0) {
      now_ += visit.forward_seconds;
      return;
    }
    step_.to_host_seconds += visit.sending_seconds;
    if (visit.moved > stash_) {
      now_ = to_host_ = std::max(now_ + visit.forward_seconds, to_host_) + visit.sending_seconds;
      return;
    }
    now_ = leaving_.wait(now_, stash_ - visit.moved);
    to_host_ = std::max(std::max(to_host_, now_) + visit.sending_seconds, now_ + visit.forward_seconds);
    now_ += visit.forward_seconds;
    leaving_.add(to_host_, visit.moved);
  }

  void backward(const Visit& visit) {
    step_.compute_seconds += visit.backward_seconds;
    if (visit.moved == 0) {
      now_ += visit.backward_seconds;
      return;
    }
    if (visit.moved > stash_) {
      to_device_ = std::max(to_device_, now_);
    } else {
      to_device_ = ahead_.wait(std::max(to_device_, turned_), stash_ - visit.moved);
      to_device_ = leaving_.wait(to_device_, stash_ - visit.moved - ahead_.bytes());
    }
    bring(visit.bringing_seconds);
    now_ = std::max(now_, to_device_) + visit.backward_seconds;
    if (visit.moved <= stash_) {
      ahead_.add(now_, visit.moved);
    }
  }

  void send_gradients(std::size_t i) {
    const Bytes bytes = segments_[i].gradients.all;
    if (bytes > 0) {
      const double sending = static_cast<double>(bytes) / machine_.to_host;
      to_host_ = std::max(to_host_, now_) + sending;
      step_.to_host_seconds += sending;
      gradients_.add(to_host_, bytes);
    }
  }

  void bring(double seconds) {
    to_device_ += seconds;
    step_.to_device_seconds += seconds;
  }

  const std::vector<ActivationSegment>& segments_;
  const ActivationMachine& machine_;
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

SimulatedStep simulate_step(const std::vector<ActivationSegment>& segments, const ActivationMachine& machine,
                            int microbatches, const ActivationTreatment& treatment) {
  StepRun run(segments, machine, treatment);
  for (int left = microbatches; left > 0; left -= treatment.round_size) {
    run.round(std::min(left, treatment.round_size), left <= treatment.round_size);
  }
  SimulatedStep step = run.result();
  double forward = 0;
  for (const ActivationSegment& segment : segments) {
    forward += microbatches * segment.forward_seconds;
  }
  step.seconds += std::max(0.0, machine.update_seconds - forward);
  return step;
}

}  // namespace hydra
