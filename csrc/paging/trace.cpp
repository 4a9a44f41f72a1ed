#include "csrc/paging/trace.h"

namespace hydra {

void Trace::begin(PassKind kind, int version) {
  pass_ = {kind, version};
  if (any_before_) {
    successor_[previous_] = pass_;
  }
  open_ = true;
  current_.clear();
  prologue_peak_ = 0;
  next_ = 0;
  const auto known = recorded_.find(pass_);
  following_ = known != recorded_.end() && !known->second.entries.empty();
}

void Trace::arrive(std::int32_t block, Bytes activation_peak) {
  if (!open_) {
    return;
  }
  if (current_.empty()) {
    prologue_peak_ = activation_peak;
  } else {
    current_.back().lately = activation_peak;
  }
  current_.push_back({.block = block});
  if (!following_) {
    return;
  }
  const Entries& expected = recorded_[pass_].entries;
  const auto from = expected.begin() + static_cast<std::ptrdiff_t>(next_);
  const auto found = std::find_if(from, expected.end(), [&](const Entry& entry) { return entry.block == block; });
  following_ = found != expected.end();
  if (following_) {
    next_ = static_cast<std::size_t>(found - expected.begin()) + 1;
  }
}

void Trace::end(Bytes activation_peak, bool completed) {
  if (!open_) {
    return;
  }
  open_ = false;
  following_ = false;
  any_before_ = true;
  previous_ = pass_;
  if (!completed || current_.empty()) {
    return;
  }
  current_.back().lately = activation_peak;
  current_.front().lately = std::max(current_.front().lately, prologue_peak_);
  Record& record = recorded_[pass_];
  Entries& entries = record.entries;
  const bool same = std::ranges::equal(entries, current_, {}, &Entry::block, &Entry::block);
  if (!same) {
    order_changes_ += entries.empty() ? 0 : 1;
    record = {.entries = std::move(current_)};
    current_ = {};
    return;
  }
  --record.left;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    entries[i].lately = std::max(entries[i].lately, current_[i].lately);
    if (record.left == 0) {
      entries[i].before = std::exchange(entries[i].lately, 0);
    }
  }
  record.left = record.left == 0 ? kWindow : record.left;
}

void Trace::forget_activations() {
  for (auto& [pass, record] : recorded_) {
    for (Entry& entry : record.entries) {
      entry.before = entry.activations();
      entry.lately = 0;
    }
    record.left = 1;
  }
}

std::vector<std::pair<std::int32_t, Bytes>> Trace::recorded(PassKind kind) const {
  std::vector<std::pair<std::int32_t, Bytes>> entries;
  if (const auto known = recorded_.find({kind, 0}); known != recorded_.end()) {
    for (const Entry& entry : known->second.entries) {
      entries.emplace_back(entry.block, entry.activations());
    }
  }
  return entries;
}

std::vector<Use> Trace::future(Bytes limit, Bytes gradient_reserve, std::size_t blocks) const {
  std::vector<Use> uses;
  if (!open_ || !following_) {
    return uses;
  }
  const auto append = [&](const Pass& pass, std::size_t from, bool loadable) {
    const Bytes room = pass.first == PassKind::kBackward ? limit - gradient_reserve : limit;
    const Entries& entries = recorded_.at(pass).entries;
    for (std::size_t i = from; i < entries.size(); ++i) {
      uses.push_back({entries[i].block, room - entries[i].activations(), loadable});
    }
  };
  append(pass_, next_ == 0 ? 0 : next_ - 1, true);
  Pass pass = pass_;
  for (int passes = 0; passes < 2 && uses.size() < 4 * blocks; ++passes) {
    const auto successor = successor_.find(pass);
    if (successor == successor_.end() || !recorded_.contains(successor->second)) {
      break;
    }
    pass = successor->second;
    append(pass, 0, false);
  }
  return uses;
}

}  // namespace hydra
