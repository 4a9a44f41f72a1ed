#include "csrc/pytorch/stash/stash.h"

#include <ATen/ops/clone.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>

#include "csrc/base/clock.h"
#include "csrc/base/errors.h"
#include "csrc/pytorch/parameters/fault_key.h"
#include "csrc/pytorch/stash/treatment.h"
#include "csrc/pytorch/threads/gil.h"

namespace hydra {

namespace autograd = torch::autograd;

namespace {

using Lock = IntervalIndex::Lock;

/// The offsets in the storage of the tensor's first byte, and of the byte behind its last.
std::pair<Bytes, Bytes> extent_of(const at::Tensor& tensor) {
  const auto itemsize = static_cast<Bytes>(tensor.itemsize());
  Bytes last = 0;
  for (std::int64_t dimension = 0; dimension < tensor.dim(); ++dimension) {
    last += (tensor.size(dimension) - 1) * tensor.stride(dimension);
  }
  const Bytes begin = tensor.storage_offset() * itemsize;
  return {begin, begin + (last + 1) * itemsize};
}

bool is_of_leaf(const at::Tensor& tensor) {
  const autograd::DifferentiableViewMeta* view = autograd::impl::get_view_autograd_meta(tensor);
  const bool is_view = view != nullptr && view->has_bw_view();
  const at::Tensor& base = is_view ? view->get_backward_view().base_ : tensor;
  return base.is_leaf() && base.requires_grad();
}

bool is_plain(const at::Tensor& tensor) {
  const auto* const impl = tensor.unsafeGetTensorImpl();
  const c10::DispatchKeySet keys = tensor.key_set();
  return tensor.layout() == at::kStrided && impl->has_storage() && !tensor.is_quantized() && !tensor.is_meta() &&
         !impl->is_python_dispatch() && !tensor.is_conj() && !tensor.is_neg() && !tensor.is_inference() &&
         !impl->has_symbolic_sizes_strides() && !keys.has(c10::DispatchKey::FuncTorchGradWrapper) &&
         !keys.has(kFaultKey);  // a device parameter, which may be absent now
}

StashIdentity new_identity() {
  static std::atomic<StashIdentity> last{0};
  return ++last;
}

}  // namespace

// ---- saving ---------------------------------------------------------------------------------------------------------
Stash::Stash(std::shared_ptr<DeviceBackend> backend, std::shared_ptr<HostArena> arena, c10::Device device,
             std::optional<Bytes> budget)
    : identity_(new_identity()),
      backend_(std::move(backend)),
      copies_(std::make_shared<CopyStore>(std::move(arena))),
      index_(std::make_shared<IntervalIndex>(budget)),
      device_(device) {}

Stash::~Stash() {
  // Transfers have to end before the device does. The objects that they drop may need the interpreter.
  const ReleaseGilIfHeld released;
  backend_->to_host().drain();
  backend_->to_device().drain();
}

bool Stash::can_move(const at::Tensor& tensor) const {
  if (!is_plain(tensor) || tensor.device() != device_ || static_cast<Bytes>(tensor.nbytes()) < kLeastBytes ||
      is_of_leaf(tensor)) {
    return false;
  }
  const std::scoped_lock lock(protecting_);
  const auto found = protected_.find(tensor.storage().unsafeGetStorageImpl());
  return found == protected_.end() || found->second.expired();
}

SavedTensor Stash::pack(const at::Tensor& tensor) {
  const Treatment& treatment = current_treatment(identity_);
  const bool movable = can_move(tensor);
  if (treatment.kind == TreatmentKind::kKeep || !movable) {
    SavedTensor kept(tensor, SavedTensor::Kind::kKept);
    const Lock lock(*index_);
    StashFigures& figures = index_->figures(lock);
    figures.parts[current_part(identity_)].kept += movable ? static_cast<Bytes>(tensor.nbytes()) : 0;
    ++figures.statistics.tensors;
    ++figures.statistics.kept;
    return kept;
  }
  SavedTensor saved(tensor, SavedTensor::Kind::kInInterval);
  const c10::Storage& storage = tensor.storage();
  auto [begin, end] = extent_of(tensor);
  const auto whole = static_cast<Bytes>(storage.nbytes());
  if (2 * (end - begin) >= whole) {  // the rest of the storage is usually saved too
    begin = 0;
    end = whole;
  }
  const bool resident = treatment.kind == TreatmentKind::kMoveConvolutionInputs && !use_of(tensor).into_convolution;
  const Staying staying = resident ? Staying::kAlways : treatment.staying;
  Wishes wishes = treatment.kind == TreatmentKind::kCompress ? Wishes::of(tensor, *treatment.bounds) : Wishes::exact();
  const auto address = reinterpret_cast<std::uintptr_t>(storage.data()) + static_cast<std::uintptr_t>(begin);
  const SavedBytes bytes{.bytes = end - begin,
                         .lead = static_cast<Bytes>(address % static_cast<std::uintptr_t>(memory_alignment(device_))),
                         .mark = saved.mark(),
                         .stream = compute_stream(device_),
                         .part = current_part(identity_)};
  if (bytes.stream) {
    // The operator that saves the tensor has still to be enqueued, and reads memory that the stash may release before
    // then, or that belongs to another stream.
    c10::impl::VirtualGuardImpl(device_.type()).recordDataPtrOnStream(storage.data_ptr(), *bytes.stream);
  }
  const IntervalIndex::Entry entry = index_->enter(storage, begin, bytes, std::move(wishes), staying);
  saved.interval_ = entry.interval;
  saved.offset_ = tensor.storage_offset() * static_cast<Bytes>(tensor.itemsize()) - entry.begin;
  if (entry.stays) {
    return saved;
  }
  if (entry.may_encode) {
    decide();
  }
  if (entry.leaves) {
    begin_leaving(entry.interval);
  }
  make_room(0, /*in_backward=*/false);
  const Lock lock(*index_);
  index_->room(lock).note_peak();
  return saved;
}

void Stash::begin_leaving(const StashedIntervalPtr& interval) {
  finish(interval);
  std::optional<StashedInterval::Departure> departure = interval->begin_leaving();
  if (!departure) {
    return;
  }
  try {
    send(interval, *std::move(departure));
  } catch (const OutOfMemory&) {  // the interval stays on the device, which costs only room
    interval->strand();
    const Lock lock(*index_);
    ++index_->figures(lock).statistics.stayed;
  } catch (...) {  // re-raised: no thread may wait for a transfer that never began
    interval->strand();
    throw;
  }
}

void Stash::send(const StashedIntervalPtr& interval, StashedInterval::Departure departure) {
  const ReleaseGilIfHeld released;
  const Bytes bytes = departure.bytes;
  const StoredCopyPtr copy = copies_->make(bytes);
  CopyTransfer transfer;
  transfer.device = static_cast<std::byte*>(departure.storage.mutable_data()) + departure.begin;
  transfer.bytes = bytes;
  {
    const c10::OptionalStreamGuard on(interval->saved().stream);  // any thread may make it leave, on any stream
    transfer.fence = backend_->record();
  }
  // The copy may end after all tensors that share the interval.
  transfer.after = [index = index_, known = std::weak_ptr(interval), copy, bytes] {
    index->note_left(known.lock(), copy, bytes);
  };
  transfer.owner = std::make_shared<c10::Storage>(std::move(departure.storage));
  interval->leave_by(copy->receive(backend_->to_host(), std::move(transfer)));
}

void Stash::make_room(Bytes bytes, bool in_backward) {
  while (const std::optional<IntervalIndex::RoomStep> step = index_->next_for_room(bytes, in_backward)) {
    if (step->awaited) {
      wait_for_room(*step->awaited);
    } else if (step->departing && !encode(step->departing)) {
      begin_leaving(step->departing);
    }
  }
}

void Stash::wait_for_room(Ticket& ticket) {
  const Clock::time_point start = Clock::now();
  {
    const ReleaseGilIfHeld released;
    const Stall stall(backend_->stalls());
    ticket.wait_quietly();
  }
  const Lock lock(*index_);
  index_->figures(lock).statistics.wait_seconds += seconds_since(start);
}

bool Stash::await_leaving() {
  const TicketPtr transfer = index_->next_to_release();
  if (transfer) {
    wait_for_room(*transfer);
  }
  return transfer != nullptr;
}

bool Stash::give_one_up() {
  if (finisher_ == std::this_thread::get_id()) {
    return false;  // asked from inside finish(), which other intervals may need before they can leave
  }
  const std::optional<IntervalIndex::RoomStep> step = index_->next_to_give_up();
  if (!step) {
    return false;
  }
  if (step->awaited) {
    wait_for_room(*step->awaited);
  } else if (step->departing) {
    begin_leaving(step->departing);
  }
  return true;
}

// ---- life -----------------------------------------------------------------------------------------------------------
void Stash::set_budget(std::optional<Bytes> budget) {
  {
    const Lock lock(*index_);
    index_->room(lock).set_budget(budget);
  }
  make_room(0, /*in_backward=*/false);
}

void Stash::protect(const std::vector<at::Tensor>& tensors) {
  const std::scoped_lock lock(protecting_);
  std::erase_if(protected_, [](const auto& entry) { return entry.second.expired(); });
  for (const at::Tensor& tensor : tensors) {
    if (tensor.has_storage()) {
      protected_.insert_or_assign(tensor.storage().unsafeGetStorageImpl(), tensor.storage().getWeakStorageImpl());
    }
  }
}

void Stash::limit_host(Bytes bytes, std::string folder, std::shared_ptr<FileOperations> files) {
  copies_->limit(bytes, std::move(folder), std::move(files));
}

void Stash::close() noexcept {
  copies_->close();
  room_.clear();
}

std::optional<StashPass> Stash::last_pass() const {
  const Lock lock(*index_);
  return index_->room(lock).last_pass();
}

void Stash::read_lengths() const {
  const ReleaseGilIfHeld released;
  std::deque<UnreadLength> unread;
  {
    const Lock lock(*index_);
    unread.swap(index_->figures(lock).unread);
  }
  for (const UnreadLength& each : unread) {
    each.made->wait();
    const Lock lock(*index_);
    index_->figures(lock).count_length(each);
  }
}

std::map<std::int32_t, StashPart> Stash::parts() const {
  read_lengths();
  const Lock lock(*index_);
  return index_->figures(lock).parts;
}

std::map<std::string, StashExact> Stash::exact() const {
  const Lock lock(*index_);
  return index_->figures(lock).exact;
}

StashStatistics Stash::statistics() const {
  {
    const ReleaseGilIfHeld released;
    backend_->to_host().drain();
    backend_->to_device().drain();
  }
  read_lengths();
  const Bytes lent = copies_->statistics().host_bytes;
  const Lock lock(*index_);
  StashStatistics now = index_->figures(lock).statistics;
  const DeviceRoom::Usage& usage = index_->room(lock).usage();
  now.resident_bytes = usage.resident;
  now.held_bytes = usage.held;
  now.peak_held_bytes = usage.peak_held;
  now.host_bytes = lent;
  return now;
}

}  // namespace hydra
