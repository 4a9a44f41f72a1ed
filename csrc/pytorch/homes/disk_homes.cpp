#include "csrc/pytorch/homes/disk_homes.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "csrc/base/errors.h"

namespace hydra {

namespace {

Bytes bytes_of(const at::Tensor& tensor) { return static_cast<Bytes>(tensor.nbytes()); }

Bytes on_disk(Bytes bytes) noexcept { return round_up(bytes, kDiskAlignment); }

bool is_among(const WithheldTensor& one, const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor& tensor) { return shows(tensor, one.storage); });
}

}  // namespace

DiskHomes::DiskHomes(const std::string& folder, std::shared_ptr<HostArena> arena, std::shared_ptr<FileOperations> files)
    : arena_(std::move(arena)),
      plain_(std::make_shared<HostArena>()),
      files_(std::move(files)),
      file_(folder, files_ ? *files_ : system_files()),
      working_(std::make_shared<WorkingMemory>(arena_, kWorkingSets)),
      lane_(file_) {}

DiskHomes::~DiskHomes() { abandon(); }

// ---- the index of extents ---------------------------------------------------------------------

bool DiskHomes::is_forgotten(const Resting& resting) {
  return resting.role == DiskRole::kGradient && resting.members.front().tensor.storage.use_count() == 1;
}

std::optional<DiskHomes::Found> DiskHomes::find_locked(std::int32_t block, const c10::Storage& storage) const {
  const auto found = blocks_.find(block);
  for (std::size_t i = 0; found != blocks_.end() && i < found->second.resting.size(); ++i) {
    for (const Member& member : found->second.resting[i].members) {
      if (member.tensor.storage.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) {
        return Found{i, member.offset};
      }
    }
  }
  return std::nullopt;
}

bool DiskHomes::holds(const at::Tensor& tensor) const {
  const WithheldPtr withheld = withheld_of(tensor);
  const std::lock_guard lock(mutex_);
  return withheld && find_locked(withheld->block, tensor.unsafeGetTensorImpl()->unsafe_storage());
}

bool DiskHomes::holds_weights(std::int32_t block) const {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(block);
  return found != blocks_.end() &&
         std::any_of(found->second.resting.begin(), found->second.resting.end(),
                     [](const Resting& resting) { return resting.role == DiskRole::kWeights; });
}

DiskStatistics DiskHomes::statistics() const {
  DiskStatistics statistics;
  statistics.read_bytes = lane_.statistics(DiskDirection::kRead).bytes;
  statistics.written_bytes = lane_.statistics(DiskDirection::kWrite).bytes;
  statistics.working_bytes = working_->bytes();
  const std::lock_guard lock(mutex_);
  for (const auto& [block, contents] : blocks_) {
    for (const Resting& resting : contents.resting) {
      if (is_forgotten(resting)) {
        continue;
      }
      statistics.at_home_bytes.at(static_cast<std::size_t>(resting.role)) += file_.bytes(resting.extent);
    }
  }
  statistics.spared_bytes = spared_bytes_;
  statistics.wait_seconds = wait_seconds_ + working_->wait_seconds();
  return statistics;
}

std::int32_t DiskHomes::take_extent(Bytes bytes) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = free_extents_.find(on_disk(bytes));
    if (found != free_extents_.end()) {
      const std::int32_t extent = found->second;
      free_extents_.erase(found);
      return extent;
    }
  }
  return file_.reserve(bytes);
}

void DiskHomes::reserve(const std::vector<Bytes>& sizes) {
  for (const Bytes bytes : sizes) {
    free_extent(file_.reserve(bytes));
  }
}

void DiskHomes::free_extent(std::int32_t extent) {
  const Bytes bytes = file_.bytes(extent);
  const std::lock_guard lock(mutex_);
  free_extents_.emplace(bytes, extent);
}

void DiskHomes::add(std::int32_t block, Resting resting) {
  std::vector<c10::DataPtr> freed;  // destroyed without the lock
  for (const Member& member : resting.members) {
    freed.push_back(note_on_disk(member.tensor));
  }
  const std::lock_guard lock(mutex_);
  blocks_[block].resting.push_back(std::move(resting));
  peek_ = {};
}

void DiskHomes::drop_unused(std::int32_t block) {
  std::vector<Resting> dropped;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(block);
  if (found == blocks_.end()) {
    return;
  }
  auto& resting = found->second.resting;
  const auto gone =
      std::stable_partition(resting.begin(), resting.end(), [](const Resting& each) { return !is_forgotten(each); });
  for (auto each = gone; each != resting.end(); ++each) {
    free_extents_.emplace(file_.bytes(each->extent), each->extent);
    dropped.push_back(std::move(*each));
  }
  resting.erase(gone, resting.end());
}

// ---- to the disk ------------------------------------------------------------------------------

at::Tensor DiskHomes::make(std::int32_t block, const at::Tensor& like, at::ScalarType dtype, bool copies,
                           const std::weak_ptr<PagedModel>& owner) {
  // Only the sizes and strides of `like` are read: an operation on it could bring its bytes to the host.
  const at::Tensor shape =
      at::empty_strided(like.sizes(), like.strides(), at::TensorOptions().dtype(dtype).device(at::kMeta));
  if (bytes_of(shape) < kLeastDiskBytes) {
    at::Tensor small = at::empty_strided(like.sizes(), like.strides(), at::TensorOptions().dtype(dtype));
    const at::Tensor here = copies ? read(block, like) : at::Tensor();
    return copies ? small.copy_(here.defined() ? here : like) : small.zero_();
  }
  const std::int32_t extent = take_extent(bytes_of(shape));
  at::Tensor tensor = make_withheld(shape, owner, block, nullptr);
  Resting resting{.role = DiskRole::kState, .extent = extent, .members = {{{tensor, tensor.storage()}}}};
  if (copies) {
    resting.copy_of = like;
  }
  add(block, std::move(resting));
  return tensor;
}

void DiskHomes::settle(std::int32_t block, const std::vector<at::Tensor>& tensors,
                       const std::weak_ptr<PagedModel>& owner) {
  const std::lock_guard alone(moving_);
  if (holds_other_state(block, tensors)) {  // the user may still have it, although no optimizer does
    bring_home_alone(block, [](const Resting& resting) { return resting.role == DiskRole::kState; });
  }
  std::vector<at::Tensor> movers;
  std::vector<std::int32_t> extents;
  for (const at::Tensor& tensor : tensors) {
    if (bytes_of(tensor) >= kLeastDiskBytes && is_whole(tensor)) {
      if (!is_alone(tensor)) {  // loaded tensors have wrappers of their storages in Python
        tensor.set_data(tensor.clone());
      }
      movers.push_back(tensor);
    }
  }
  try {
    std::vector<TicketPtr> tickets;
    for (const at::Tensor& mover : movers) {
      extents.push_back(take_extent(bytes_of(mover)));
      const ArenaRegionPtr memory = working_->take(on_disk(bytes_of(mover)));
      std::memcpy(memory->data(), mover.const_data_ptr(), mover.nbytes());
      tickets.push_back(lane_.submit({DiskDirection::kWrite, extents.back(), memory->data(), memory}));
    }
    wait_for(tickets);
  } catch (...) {  // the tensors still have their bytes on the host
    std::for_each(extents.begin(), extents.end(), [this](std::int32_t extent) { free_extent(extent); });
    throw;
  }
  for (std::size_t i = 0; i < movers.size(); ++i) {
    add(block, {.role = DiskRole::kState,
                .extent = extents[i],
                .members = {{withhold(movers[i], owner, block)}},
                .written = true});
  }
}

bool DiskHomes::holds_other_state(std::int32_t block, const std::vector<at::Tensor>& tensors) const {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(block);
  return found != blocks_.end() &&
         std::any_of(found->second.resting.begin(), found->second.resting.end(), [&](const Resting& each) {
           return each.role == DiskRole::kState && !is_among(each.members.front().tensor, tensors);
         });
}

bool DiskHomes::settle_weights(std::int32_t block, BlockBacking& backing, const std::weak_ptr<PagedModel>& owner) {
  const std::lock_guard alone(moving_);
  if (holds_weights(block)) {
    return true;
  }
  if (!backing.can_leave()) {
    return false;
  }
  ArenaRegionPtr memory = backing.home();
  if (!memory) {
    memory = working_->take(on_disk(backing.home_bytes()));
    for (const auto& [parameter, offset] : backing.places()) {
      std::memcpy(memory->data() + offset, parameter->host_data(), static_cast<std::size_t>(parameter->host_bytes()));
    }
  }
  const std::int32_t extent = take_extent(backing.home_bytes());
  try {
    lane_.submit({DiskDirection::kWrite, extent, memory->data(), memory})->wait();
  } catch (...) {  // the weights are still on the host
    free_extent(extent);
    throw;
  }
  Resting resting{.role = DiskRole::kWeights, .extent = extent, .written = true, .backing = &backing};
  for (const auto& [parameter, offset] : backing.places()) {
    parameter->note_withheld(/*to_disk=*/true);
    resting.members.push_back({withhold(parameter->host, owner, block), offset});
  }
  backing.went_to_disk();
  add(block, std::move(resting));
  return true;
}

void DiskHomes::store_gradients(std::int32_t block, const std::vector<at::Tensor>& gradients,
                                const std::weak_ptr<PagedModel>& owner, Bytes backlog) {
  const std::lock_guard alone(moving_);
  drop_unused(block);
  for (const at::Tensor& gradient : gradients) {
    Bytes under_way = on_disk(bytes_of(gradient));
    std::erase_if(gradient_writes_, [](const TicketPtr& ticket) { return ticket->finished() && !ticket->error(); });
    for (const TicketPtr& ticket : gradient_writes_) {
      under_way += ticket->finished() ? 0 : ticket->bytes();
    }
    for (auto oldest = gradient_writes_.begin(); oldest != gradient_writes_.end() && under_way > backlog; ++oldest) {
      under_way -= (*oldest)->finished() ? 0 : (*oldest)->bytes();
      (*oldest)->wait_quietly();
    }
    const std::int32_t extent = take_extent(bytes_of(gradient));
    // The job owns the gradient's bytes from here on.
    const auto memory = std::make_shared<c10::DataPtr>();
    gradient_writes_.push_back(lane_.submit({DiskDirection::kWrite, extent, gradient.mutable_data_ptr(), memory}));
    WithheldTensor withheld = withhold(gradient, owner, block);
    *memory = note_on_disk(withheld);
    withheld.tensor.reset();  // the user may drop the gradient
    Member member{.tensor = std::move(withheld)};
    member.gradient = gradient.getIntrusivePtr();
    add(block, {.role = DiskRole::kGradient, .extent = extent, .members = {std::move(member)}, .written = true});
  }
}

void DiskHomes::expect_gradients() {
  const std::lock_guard alone(moving_);
  wait_for({gradient_writes_.begin(), gradient_writes_.end()});
  gradient_writes_.clear();
}

}  // namespace hydra
