#include "csrc/pytorch/parameters/block_backing.h"

#include <algorithm>
#include <cstring>

#include "csrc/pytorch/homes/weight_loans.h"
#include "csrc/pytorch/parameters/withheld.h"

namespace hydra {

BlockBacking::BlockBacking(std::vector<HostParameter*> parameters, SharedHost& shared)
    : parameters_(std::move(parameters)), shared_(shared) {
  for (HostParameter* parameter : parameters_) {
    parameter->page->offset = slot_bytes_;
    home_offsets_.push_back(home_bytes_);
    slot_bytes_ += round_up(parameter->face_bytes(), kPageAlignment);
    home_bytes_ += round_up(parameter->host_bytes(), kPageAlignment);
  }
  home_ = std::make_shared<ArenaRegion>(shared_.arena, home_bytes_);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    HostParameter& parameter = *parameters_[i];
    parameter.adopted = adopt_into(parameter.host, home_, home_offsets_[i]);
    whole_ = whole_ && parameter.adopted;
    parameter.note_seen();
  }
}

bool BlockBacking::casts() const noexcept {
  for (const HostParameter* parameter : parameters_) {
    if (!parameter->same_dtype()) {
      return true;
    }
  }
  return false;
}

Bytes BlockBacking::foreign_bytes() const noexcept {
  Bytes bytes = 0;
  for (const HostParameter* parameter : parameters_) {
    bytes += parameter->adopted ? 0 : parameter->host_bytes();
  }
  return bytes;
}

std::size_t BlockBacking::index_of(const HostParameter& parameter) const {
  return static_cast<std::size_t>(std::find(parameters_.begin(), parameters_.end(), &parameter) - parameters_.begin());
}

const std::byte* BlockBacking::source_of(const HostParameter& parameter) const {
  if (aside_) {
    if (const std::size_t index = index_of(parameter); is_aside_[index]) {
      return aside_->data() + home_offsets_[index];
    }
  }
  return parameter.host_data();
}

void BlockBacking::cast_into_staging() {
  if (staging_.valid) {
    return;
  }
  ArenaRegionPtr& region = staging_.region;
  region = region ? region : std::make_shared<ArenaRegion>(shared_.arena, slot_bytes_);
  for (const HostParameter* parameter : parameters_) {
    cast(*parameter, source_of(*parameter), region->data() + parameter->page->offset);
  }
  staging_.valid = true;
}

void BlockBacking::cast(const HostParameter& parameter, const std::byte* from, std::byte* to) const {
  // Both have the same layout, without gaps: equal ranges of their memory have the same elements.
  shared_.casting.convert({to, parameter.face.scalar_type()},
                          {const_cast<std::byte*>(from), parameter.host.scalar_type()}, parameter.host.numel());
}

void BlockBacking::wait_before_fill(std::shared_ptr<DeferredUpdate> update) {
  const std::lock_guard lock(update_mutex_);
  update_ = std::move(update);
}

Job BlockBacking::fill(void* slot) {
  Job job;
  auto* const base = static_cast<std::byte*>(slot);
  std::shared_ptr<DeferredUpdate> update;
  {
    const std::lock_guard lock(update_mutex_);
    update = update_;
  }
  if (on_disk_) {
    return fill_from_disk(base, update);
  }
  if (update) {
    job.before = [update, block = parameters_.front()->page->block] { update->wait(block); };
  }
  if (casts()) {
    job.segments.push_back({base, nullptr, slot_bytes_});
    job.locate = [this](std::vector<Segment>& segments) {
      cast_into_staging();
      segments.front().source = staging_.region->data();
    };
    return job;
  }
  const std::byte* const whole = aside_ ? aside_->data() : home_->data();
  bool in_place = whole_;
  for (std::size_t i = 0; i < parameters_.size() && in_place; ++i) {
    in_place = source_of(*parameters_[i]) == whole + home_offsets_[i];
  }
  if (in_place) {
    job.segments.push_back({base, whole, slot_bytes_});
    return job;
  }
  job.segments = from_hosts(base);
  return job;
}

std::vector<Segment> BlockBacking::from_hosts(std::byte* slot) const {
  std::vector<Segment> segments;
  for (const HostParameter* parameter : parameters_) {
    segments.push_back({slot + parameter->page->offset, source_of(*parameter), parameter->face_bytes()});
  }
  return segments;
}

Job BlockBacking::fill_from_disk(std::byte* slot, const std::shared_ptr<DeferredUpdate>& update) {
  const std::int32_t block = parameters_.front()->page->block;
  auto loan = loans_->expect(block, casts() ? home_bytes_ + slot_bytes_ : home_bytes_, update);
  Job job;
  job.segments.push_back({slot, nullptr, slot_bytes_});
  job.locate = [this, slot, loan = std::move(loan)](std::vector<Segment>& segments) {
    const std::byte* const weights = loan->begin();  // null: the weights have returned to the host
    const auto source = [&](std::size_t i) -> const std::byte* {
      return weights != nullptr && parameters_[i]->on_disk() ? weights + home_offsets_[i] : source_of(*parameters_[i]);
    };
    const bool all = std::all_of(parameters_.begin(), parameters_.end(), [&](const HostParameter* parameter) {
      return weights != nullptr && parameter->on_disk();
    });
    if (all && !casts()) {
      segments.front().source = weights;
      return;
    }
    segments.clear();
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const Bytes offset = parameters_[i]->page->offset;
      const std::byte* from = source(i);
      if (!parameters_[i]->same_dtype()) {
        std::byte* const staging = loan->memory() + home_bytes_ + offset;
        cast(*parameters_[i], from, staging);
        from = staging;
      }
      segments.push_back({slot + offset, from, parameters_[i]->face_bytes()});
    }
  };
  return job;
}

// ---- to the disk and back ---------------------------------------------------------------------

bool BlockBacking::can_leave() const {
  return std::all_of(parameters_.begin(), parameters_.end(), [](const HostParameter* parameter) {
    return !parameter->withheld() && parameter->mismatch().empty() && is_alone(parameter->host);
  });
}

ArenaRegionPtr BlockBacking::home() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i]->host_data() != home_->data() + home_offsets_[i]) {
      return nullptr;
    }
  }
  return home_;
}

std::vector<std::pair<HostParameter*, Bytes>> BlockBacking::places() const {
  std::vector<std::pair<HostParameter*, Bytes>> places;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    places.emplace_back(parameters_[i], home_offsets_[i]);
  }
  return places;
}

void BlockBacking::went_to_disk() noexcept {
  on_disk_ = true;
  home_.reset();
  staging_ = {};
}

void BlockBacking::came_home(ArenaRegionPtr home) noexcept {
  home_ = std::move(home);
  for (HostParameter* parameter : parameters_) {
    if (parameter->on_disk()) {  // the user has not given it other bytes meanwhile
      parameter->note_came_home();
    }
  }
  on_disk_ = false;
}

Job BlockBacking::write_back(void* slot) {
  staging_.valid = false;
  Job job;
  const auto* const base = static_cast<const std::byte*>(slot);
  for (HostParameter* parameter : parameters_) {
    if (!parameter->same_dtype()) {
      continue;  // the write was refused when it was seen
    }
    job.segments.push_back(
        {const_cast<std::byte*>(source_of(*parameter)), base + parameter->page->offset, parameter->face_bytes()});
  }
  return job;
}

void BlockBacking::publish(void* slot) noexcept {
  for (const HostParameter* parameter : parameters_) {
    hydra::publish(*parameter->page, static_cast<std::byte*>(slot) + parameter->page->offset);
  }
}

void BlockBacking::withdraw() noexcept {
  for (const HostParameter* parameter : parameters_) {
    hydra::withdraw(*parameter->page, "made room for another block");
  }
}

void BlockBacking::take_aside() {
  is_aside_.assign(parameters_.size(), false);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const HostParameter& parameter = *parameters_[i];
    if (parameter.withheld()) {
      continue;
    }
    aside_ = aside_ ? aside_ : std::make_shared<ArenaRegion>(shared_.arena, home_bytes_);
    const auto bytes = static_cast<std::size_t>(parameter.host_bytes());
    std::memcpy(aside_->data() + home_offsets_[i], parameter.host_data(), bytes);
    is_aside_[i] = true;
  }
}

void BlockBacking::conceal() {
  for (std::size_t i = 0; aside_ && i < parameters_.size(); ++i) {
    if (is_aside_[i]) {
      std::memset(parameters_[i]->host_data(), 0xff, static_cast<std::size_t>(parameters_[i]->host_bytes()));
    }
  }
}

void BlockBacking::reveal() noexcept {
  for (std::size_t i = 0; aside_ && i < parameters_.size(); ++i) {
    if (is_aside_[i]) {
      std::memcpy(parameters_[i]->host_data(), aside_->data() + home_offsets_[i],
                  static_cast<std::size_t>(parameters_[i]->host_bytes()));
    }
  }
  aside_.reset();
}

}  // namespace hydra
