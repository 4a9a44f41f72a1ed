#include "csrc/pytorch/homes/device_homes.h"

#include <algorithm>
#include <utility>

#include "csrc/base/errors.h"
#include "csrc/pytorch/memory/acquired_block.h"
#include "csrc/transfer/shared_backend.h"

namespace hydra {

namespace {

/// The storage's own bytes on the host.
std::byte* withheld_memory(const WithheldTensor& withheld) {
  return static_cast<std::byte*>(withheld_of(withheld.storage)->memory.get());
}

bool can_settle(const BlockBacking& backing, const std::vector<at::Tensor>& state) {
  const auto& parameters = backing.parameters();
  return std::all_of(parameters.begin(), parameters.end(),
                     [](const HostParameter* parameter) {
                       return parameter->adopted && parameter->same_dtype() && is_alone(parameter->host);
                     }) &&
         std::all_of(state.begin(), state.end(), is_alone);
}

}  // namespace

/// A plan of the move of a block's bytes to the host.
struct DeviceHomes::Return {
  std::vector<Segment> segments;
  std::vector<FencePtr> after;
  std::vector<ArenaRegionPtr> gradients;  // one for each member; null if the user has dropped the gradient
  std::int64_t writes = 0;                // the slot's count of writes when the plan was made
};

DeviceHomes::DeviceHomes(DeviceBackend& backend, Pager& pager, Resource& memory, std::shared_ptr<HostArena> arena)
    : backend_(backend),
      math_(dynamic_cast<DeviceMath*>(&device_of(backend))),
      pager_(pager),
      memory_(memory),
      arena_(std::move(arena)) {}

DeviceHomes::Home* DeviceHomes::find_locked(std::int32_t block) const {
  const auto index = static_cast<std::size_t>(block);
  return index < homes_.size() ? homes_[index].get() : nullptr;
}

DeviceHomes::Member* DeviceHomes::member_locked(const HostParameter& parameter) const {
  Home* const home = find_locked(parameter.page->block);
  if (home == nullptr) {
    return nullptr;
  }
  const auto member = std::find_if(home->members.begin(), home->members.end(),
                                   [&](const Member& one) { return one.parameter == &parameter; });
  return member == home->members.end() ? nullptr : &*member;
}

void DeviceHomes::move(Lane& lane, std::vector<Segment> segments, std::vector<FencePtr> after) {
  std::erase_if(segments, [](const Segment& segment) { return segment.bytes == 0; });
  if (segments.empty()) {
    return;
  }
  Job job;
  job.segments = std::move(segments);
  job.priority = Priority::kFault;
  job.fences = std::move(after);
  job.fences.push_back(backend_.record());
  const Bytes bytes = job.bytes();
  const TicketPtr ticket = lane.submit(std::move(job));
  backend_.compute_waits(*ticket);
  ticket->wait();
  statistics_.moved_bytes += bytes;
}

// ---- to the device ----------------------------------------------------------------------------

bool DeviceHomes::settle(std::int32_t block, const BlockBacking& backing, const std::vector<at::Tensor>& state,
                         const std::weak_ptr<PagedModel>& owner) {
  if (!can_settle(backing, state)) {
    return false;
  }
  // Before the lock, since acquire() may make room for the slot from another home.
  try {
    pager_.acquire(block, AcquireReason::kHook);
  } catch (const OutOfMemory&) {
    return false;
  }
  const AcquiredBlock acquired(pager_, block);
  const std::lock_guard lock(mutex_);
  HYDRA_EXPECT(find_locked(block) == nullptr, StateError,
               "the home of block " + std::to_string(block) + " is the device already");
  auto home = std::make_unique<Home>();
  std::vector<Bytes> offsets;
  for (const at::Tensor& tensor : state) {
    offsets.push_back(home->memory_bytes);
    home->memory_bytes += round_up(static_cast<Bytes>(tensor.nbytes()), kPageAlignment);
  }
  Bytes gradients = 0;
  for (const HostParameter* parameter : backing.parameters()) {
    gradients += parameter->host.requires_grad() ? parameter->face_bytes() : 0;
  }
  try {
    home->memory = home->memory_bytes > 0 ? memory_.allocate(home->memory_bytes) : nullptr;
  } catch (const OutOfMemory&) {
    return false;
  }
  try {
    auto* const base = static_cast<std::byte*>(home->memory);
    std::vector<Segment> segments;
    for (std::size_t i = 0; i < state.size(); ++i) {
      segments.push_back({base + offsets[i], state[i].const_data_ptr(), static_cast<Bytes>(state[i].nbytes())});
    }
    move(backend_.to_device(), std::move(segments), {});
    pager_.contents().settle(block, home->memory_bytes + gradients);
    home->slot = static_cast<std::byte*>(pager_.contents().of(block).memory);
    for (HostParameter* parameter : backing.parameters()) {
      parameter->note_withheld();
      home->members.push_back(
          {parameter, withhold(parameter->host, owner, block, home->slot + parameter->page->offset), {}, {}, {}});
    }
    for (std::size_t i = 0; i < state.size(); ++i) {
      home->states.push_back({withhold(state[i], owner, block, base + offsets[i]), offsets[i]});
    }
  } catch (...) {  // the lane has failed, before any tensor was withheld
    release_locked(*home);
    throw;
  }
  homes_.resize(std::max(homes_.size(), static_cast<std::size_t>(block) + 1));
  homes_[static_cast<std::size_t>(block)] = std::move(home);
  ++statistics_.settled;
  return true;
}

void DeviceHomes::wait_for_compute(const Home& home) noexcept {
  if (home.updated) {
    home.updated->wait();
  }
  for (const Member& member : home.members) {
    if (member.written) {
      member.written->wait();
    }
  }
}

void DeviceHomes::release_locked(Home& home) noexcept {
  if (home.memory != nullptr) {
    memory_.release(std::exchange(home.memory, nullptr), home.memory_bytes);
  }
}

// ---- to the host ------------------------------------------------------------------------------

DeviceHomes::Return DeviceHomes::plan_return_locked(std::int32_t block, Home& home) const {
  SlotContents slot = pager_.contents().of(block);
  Return planned{.segments = {}, .after = std::move(slot.uses), .gradients = {}, .writes = slot.writes};
  planned.after.push_back(home.updated);
  for (const Member& member : home.members) {
    const HostParameter& parameter = *member.parameter;
    planned.segments.push_back(
        {parameter.withheld_data, home.slot + parameter.page->offset, static_cast<Bytes>(parameter.face_bytes())});
    planned.after.push_back(member.written);
    ArenaRegionPtr region;
    if (member.shown && member.shown.use_count() > 1) {
      const auto bytes = static_cast<Bytes>(member.gradient.nbytes());
      region = std::make_shared<ArenaRegion>(arena_, bytes);
      planned.segments.push_back({region->data(), member.gradient.const_data_ptr(), bytes});
    }
    planned.gradients.push_back(std::move(region));
  }
  for (const State& state : home.states) {
    planned.segments.push_back({withheld_memory(state.tensor), static_cast<std::byte*>(home.memory) + state.offset,
                                static_cast<Bytes>(state.tensor.storage.nbytes())});
  }
  return planned;
}

void DeviceHomes::bring_home_locked(std::int32_t block, Departed& departed) {
  Home* const home = find_locked(block);
  if (home == nullptr) {
    return;
  }
  Return planned;
  do {
    planned = plan_return_locked(block, *home);
    move(backend_.to_host(), std::move(planned.segments), std::move(planned.after));
  } while (!pager_.contents().unsettle(block, planned.writes));
  for (std::size_t i = 0; i < home->members.size(); ++i) {
    const Member& member = home->members[i];
    const bool replaced = !member.parameter->withheld();
    member.parameter->changed_since_seen();  // passes version bumps on to the face
    give_back(member.weights);
    member.parameter->note_given_back();
    if (!replaced) {
      member.parameter->note_seen();
    }
    if (planned.gradients[i]) {
      withheld_of(member.shown)->memory = data_pointer_into(planned.gradients[i], 0);
      // Only the storage is returned: other threads may use the `.grad` tensor. It keeps the fault key, which then
      // finds no reason to wait.
      give_back({at::Tensor(), member.shown});
    }
  }
  for (const State& state : home->states) {
    give_back(state.tensor);
  }
  release_locked(*home);
  departed.homes.push_back(std::move(homes_[static_cast<std::size_t>(block)]));
  ++statistics_.returned;
}

void DeviceHomes::bring_home(std::int32_t block) {
  Departed departed;
  const std::lock_guard lock(mutex_);
  bring_home_locked(block, departed);
}

void DeviceHomes::bring_home() {
  Departed departed;
  const std::lock_guard lock(mutex_);
  for (std::size_t block = 0; block < homes_.size(); ++block) {
    bring_home_locked(static_cast<std::int32_t>(block), departed);
  }
}

bool DeviceHomes::give_one_up() {
  Departed departed;
  const std::lock_guard lock(mutex_);
  const std::int32_t block = pager_.contents().last_needed_settled();
  if (block < 0) {
    return false;
  }
  bring_home_locked(block, departed);
  return true;
}

void DeviceHomes::abandon() noexcept {
  std::vector<std::unique_ptr<Home>> departed;
  const std::lock_guard lock(mutex_);
  departed = std::exchange(homes_, {});
  for (const auto& home : departed) {
    if (!home) {
      continue;
    }
    wait_for_compute(*home);
    for (const Member& member : home->members) {
      give_up(member.weights);
      member.parameter->note_given_back();
      if (member.shown) {
        give_up({at::Tensor(), member.shown});
      }
    }
    for (const State& state : home->states) {
      give_up(state.tensor);
    }
    release_locked(*home);
  }
}

// ---- queries ----------------------------------------------------------------------------------

DeviceHomes::Member* DeviceHomes::shown_by_locked(const at::Tensor& host) const {
  const WithheldPtr withheld = withheld_of(host);
  Home* const home = withheld ? find_locked(withheld->block) : nullptr;
  if (home == nullptr) {
    return nullptr;
  }
  const auto member = std::find_if(home->members.begin(), home->members.end(), [&](const Member& one) {
    return shows(host, one.shown) && shows(gradient_of(one.parameter->host), one.shown) && host.storage_offset() == 0 &&
           host.sizes() == one.gradient.sizes();
  });
  return member == home->members.end() ? nullptr : &*member;
}

bool DeviceHomes::any() const {
  const std::lock_guard lock(mutex_);
  return std::any_of(homes_.begin(), homes_.end(), [](const auto& home) { return home != nullptr; });
}

bool DeviceHomes::holds(std::int32_t block) const {
  const std::lock_guard lock(mutex_);
  return find_locked(block) != nullptr;
}

std::vector<std::int32_t> DeviceHomes::blocks() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::int32_t> held;
  for (std::size_t block = 0; block < homes_.size(); ++block) {
    if (homes_[block]) {
      held.push_back(static_cast<std::int32_t>(block));
    }
  }
  return held;
}

HomeStatistics DeviceHomes::statistics() const {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

}  // namespace hydra
