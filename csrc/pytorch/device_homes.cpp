#include "csrc/pytorch/device_homes.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "csrc/base/errors.h"
#include "csrc/pytorch/counting_allocator.h"

namespace hydra {

namespace {

at::Tensor& gradient_of(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->mutable_grad(); }

c10::Storage storage_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->has_storage()
             ? tensor.unsafeGetTensorImpl()->unsafe_storage()
             : c10::Storage();
}

bool same_storage(const at::Tensor& tensor, const c10::Storage& storage) {
  return storage && storage_of(tensor).unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
}

/// The storage's own bytes on the host.
std::byte* withheld_memory(const WithheldTensor& withheld) {
  return static_cast<std::byte*>(withheld_of(withheld.storage)->memory.get());
}

bool can_stay(const HostParameter& parameter, const at::Tensor& gradient) {
  return gradient.layout() == at::kStrided && gradient.numel() > 0 && gradient.is_non_overlapping_and_dense() &&
         !gradient.requires_grad() && gradient.scalar_type() == parameter.host_dtype &&
         gradient.device() == parameter.face.device() && gradient.sizes() == parameter.face.sizes() &&
         gradient.strides() == parameter.face.strides() && !torch::autograd::impl::post_acc_grad_hooks(parameter.host);
}

bool is_whole(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && withheld_of(tensor) == nullptr && tensor.storage_offset() == 0 &&
         tensor.nbytes() == tensor.storage().nbytes();
}

bool can_settle(const BlockBacking& backing, const std::vector<at::Tensor>& state) {
  const auto& parameters = backing.parameters();
  return std::all_of(parameters.begin(), parameters.end(),
                     [](const HostParameter* parameter) {
                       return parameter->adopted && parameter->same_dtype() && is_whole(parameter->host);
                     }) &&
         std::all_of(state.begin(), state.end(), is_whole);
}

/// Releases a block that was acquired.
class Acquired {
 public:
  Acquired(Pager& pager, std::int32_t block) noexcept : pager_(pager), block_(block) {}
  ~Acquired() { pager_.release(block_, AcquireReason::kHook); }
  Acquired(const Acquired&) = delete;
  Acquired& operator=(const Acquired&) = delete;

 private:
  Pager& pager_;
  std::int32_t block_;
};

}  // namespace

DeviceHomes::DeviceHomes(DeviceBackend& backend, Pager& pager, Resource& memory, std::shared_ptr<HostArena> arena)
    : backend_(backend),
      math_(dynamic_cast<DeviceMath*>(&backend)),
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

void DeviceHomes::move(Lane& lane, std::vector<Segment> segments, FencePtr after) {
  std::erase_if(segments, [](const Segment& segment) { return segment.bytes == 0; });
  if (segments.empty()) {
    return;
  }
  Job job;
  job.segments = std::move(segments);
  job.priority = Priority::kFault;
  job.fences = {backend_.record(), std::move(after)};
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
  // Before the lock: whoever makes room for the slot may take it from another home.
  try {
    pager_.acquire(block, AcquireReason::kHook);
  } catch (const OutOfMemory&) {
    return false;
  }
  const Acquired acquired(pager_, block);
  const std::lock_guard lock(mutex_);
  HYDRA_EXPECT(find_locked(block) == nullptr, StateError,
               "block " + std::to_string(block) + " is at home on the device already");
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
    move(backend_.to_device(), std::move(segments));
    pager_.settle(block, home->memory_bytes + gradients);
    home->slot = static_cast<std::byte*>(pager_.slot_of(block));
    for (HostParameter* parameter : backing.parameters()) {
      parameter->withheld_data = parameter->host_data();
      home->members.push_back(
          {parameter, withhold(parameter->host, owner, block, home->slot + parameter->page->offset), {}});
    }
    for (std::size_t i = 0; i < state.size(); ++i) {
      home->states.push_back({withhold(state[i], owner, block, base + offsets[i]), offsets[i]});
    }
  } catch (...) {  // re-raised: the lane has failed, before anything was withheld
    release_locked(*home);
    throw;
  }
  homes_.resize(std::max(homes_.size(), static_cast<std::size_t>(block) + 1));
  homes_[static_cast<std::size_t>(block)] = std::move(home);
  ++statistics_.settled;
  return true;
}

void DeviceHomes::release_locked(Home& home) noexcept {
  if (home.memory != nullptr) {
    memory_.release(std::exchange(home.memory, nullptr), home.memory_bytes);
  }
}

bool DeviceHomes::keep_gradient(HostParameter& parameter) {
  const std::lock_guard lock(mutex_);
  Member* const member = member_locked(parameter);
  if (member == nullptr) {
    return false;
  }
  const at::Tensor& gradient = gradient_of(parameter.face);
  at::Tensor& host = gradient_of(parameter.host);
  const bool ours = same_storage(host, member->gradient);
  if ((ours || !host.defined()) && can_stay(parameter, gradient)) {
    auto* const data = static_cast<std::byte*>(gradient.mutable_data_ptr());
    reclassify(gradient.storage().data(), MemoryClass::kGradients);
    if (ours) {
      withheld_of(member->gradient)->at_home = data;
      host.unsafeGetTensorImpl()->bump_version();
    } else {
      host = make_withheld(gradient, withheld_of(member->weights.storage)->owner, parameter.page->block, data);
      member->gradient = storage_of(host);
    }
    return true;
  }
  if (ours) {
    host = at::Tensor();  // what the face has is the sum of all
    member->gradient = {};
  }
  bring_home_locked(parameter.page->block);
  return false;
}

at::Tensor DeviceHomes::gradient(HostParameter& parameter) {
  const std::lock_guard lock(mutex_);
  const Member* const member = member_locked(parameter);
  const bool there = member != nullptr && same_storage(gradient_of(parameter.host), member->gradient);
  return there ? gradient_of(parameter.face) : at::Tensor();
}

bool DeviceHomes::put_gradient(HostParameter& parameter, const at::Tensor& gradient) {
  at::Tensor& known = gradient_of(parameter.face);
  {
    const std::lock_guard lock(mutex_);
    if (member_locked(parameter) == nullptr) {
      return false;
    }
    if (!known.defined()) {
      known = gradient;
    } else if (!known.is_same(gradient)) {
      const at::NoGradGuard no_grad;
      known.copy_(gradient);
    }
  }
  const bool kept = keep_gradient(parameter);
  if (!kept) {
    known = at::Tensor();
  }
  return kept;
}

bool DeviceHomes::reviewed_locked(Home& home) {
  for (Member& member : home.members) {
    const HostParameter& parameter = *member.parameter;
    const at::Tensor& host = gradient_of(parameter.host);
    if (!parameter.withheld() || (host.defined() && !same_storage(host, member.gradient))) {
      return false;  // somebody gave it other bytes, on the host
    }
    if (host.defined() || !member.gradient) {
      continue;
    }
    if (member.gradient.use_count() > 1) {
      return false;  // somebody has kept it
    }
    member.gradient = {};
    gradient_of(parameter.face) = at::Tensor();
  }
  return true;
}

void DeviceHomes::review() {
  const std::lock_guard lock(mutex_);
  for (std::size_t block = 0; block < homes_.size(); ++block) {
    if (homes_[block] && !reviewed_locked(*homes_[block])) {
      bring_home_locked(static_cast<std::int32_t>(block));
    }
  }
}

// ---- to the host ------------------------------------------------------------------------------

void DeviceHomes::bring_home_locked(std::int32_t block) {
  Home* const home = find_locked(block);
  if (home == nullptr) {
    return;
  }
  std::vector<Segment> segments;
  std::vector<ArenaRegionPtr> regions(home->members.size());
  for (std::size_t i = 0; i < home->members.size(); ++i) {
    const Member& member = home->members[i];
    const HostParameter& parameter = *member.parameter;
    segments.push_back(
        {parameter.withheld_data, home->slot + parameter.page->offset, static_cast<Bytes>(parameter.face_bytes())});
    if (member.gradient && member.gradient.use_count() > 1) {
      const auto bytes = static_cast<Bytes>(member.gradient.nbytes());
      regions[i] = std::make_shared<ArenaRegion>(arena_, bytes);
      segments.push_back({regions[i]->data(), withheld_of(member.gradient)->at_home, bytes});
    }
  }
  for (const State& state : home->states) {
    segments.push_back({withheld_memory(state.tensor), static_cast<std::byte*>(home->memory) + state.offset,
                        static_cast<Bytes>(state.tensor.storage.nbytes())});
  }
  move(backend_.to_host(), std::move(segments), home->updated);
  for (std::size_t i = 0; i < home->members.size(); ++i) {
    Member& member = home->members[i];
    const bool replaced = !member.parameter->withheld();
    give_back(member.weights);
    member.parameter->withheld_data = nullptr;
    if (!replaced) {
      member.parameter->note_seen();
    }
    if (member.gradient) {
      if (regions[i]) {
        withheld_of(member.gradient)->memory = data_pointer_into(regions[i], 0);
        at::Tensor& host = gradient_of(member.parameter->host);
        give_back({same_storage(host, member.gradient) ? host : at::Tensor(), member.gradient});
      }
      gradient_of(member.parameter->face) = at::Tensor();
    }
  }
  for (const State& state : home->states) {
    give_back(state.tensor);
  }
  release_locked(*home);
  pager_.unsettle(block);
  homes_[static_cast<std::size_t>(block)].reset();
  ++statistics_.returned;
}

void DeviceHomes::bring_home(std::int32_t block) {
  const std::lock_guard lock(mutex_);
  bring_home_locked(block);
}

void DeviceHomes::bring_home() {
  const std::lock_guard lock(mutex_);
  for (std::size_t block = 0; block < homes_.size(); ++block) {
    bring_home_locked(static_cast<std::int32_t>(block));
  }
}

bool DeviceHomes::give_one_up() {
  const std::lock_guard lock(mutex_);
  const std::int32_t block = pager_.last_needed_settled();
  if (block < 0) {
    return false;
  }
  bring_home_locked(block);
  return true;
}

void DeviceHomes::update(std::int32_t block, const StepPlan& plan, ThreadPool& pool, float scale) {
  pager_.acquire(block, AcquireReason::kHook);
  const Acquired acquired(pager_, block);
  const std::lock_guard lock(mutex_);
  Home* const home = find_locked(block);
  HYDRA_EXPECT(home != nullptr, StateError,
               "an update of block " + std::to_string(block) + " on the device, which is not its home");
  if (math_ != nullptr) {
    math_->run(plan, scale);
  } else {
    plan.run(pool, scale);
  }
  for (const Member& member : home->members) {
    member.parameter->changed_since_seen();
    member.parameter->note_seen();
    backend_.note_write(home->slot + member.parameter->page->offset, member.parameter->face_bytes());
  }
  home->updated = backend_.record();
}

void multiply_as_python_does(const at::Tensor& tensor, double factor) {
  // A number on the right keeps its precision; mul_() with a C++ scalar puts it on the left, and rounds it first.
  at::Tensor number = at::scalar_tensor(factor, at::kDouble);
  number.unsafeGetTensorImpl()->set_wrapped_number(true);
  tensor.mul_(number);
}

bool DeviceHomes::multiply_gradient(const at::Tensor& host, double factor) {
  const std::lock_guard lock(mutex_);
  const Withheld* const withheld = withheld_of(host);
  Home* const home = withheld != nullptr ? find_locked(withheld->block) : nullptr;
  if (home == nullptr) {
    return false;
  }
  const at::NoGradGuard no_grad;
  for (const Member& member : home->members) {
    if (same_storage(host, member.gradient)) {
      multiply_as_python_does(gradient_of(member.parameter->face), factor);
      host.unsafeGetTensorImpl()->bump_version();
      return true;
    }
  }
  return false;
}

// ---- what there is ----------------------------------------------------------------------------

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
