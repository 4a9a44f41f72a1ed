#include "csrc/pytorch/stash/stash.h"

#include <ATen/ops/clone.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <bit>

#include "csrc/base/clock.h"
#include "csrc/base/errors.h"
#include "csrc/pytorch/parameters/fault_key.h"
#include "csrc/pytorch/stash/treatment.h"
#include "csrc/pytorch/threads/gil.h"

namespace hydra {

namespace autograd = torch::autograd;

namespace {

using Lock = StashBooks::Lock;

/// First byte and the one after the last, in the storage.
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
         !keys.has(kFaultKey);  // of which there may be nothing on the device now
}

std::optional<c10::Stream> stream_of(c10::Device device) {
  return device.is_cuda() ? std::optional(c10::impl::VirtualGuardImpl(device.type()).getStream(device)) : std::nullopt;
}

StashIdentity new_identity() {
  static std::atomic<StashIdentity> last{0};
  return ++last;
}

/// Buffers for streams, whose lengths change a little from step to step, are used again.
Bytes buffer_bytes(const StashedInterval& interval) {
  if (!interval.coder) {
    return interval.bytes;
  }
  constexpr Bytes kLeastGranularity = 4096;
  const auto power = static_cast<Bytes>(std::bit_floor(static_cast<std::uint64_t>(interval.bytes)));
  return round_up(interval.bytes, std::max(kLeastGranularity, power / 8));
}

}  // namespace

// ---- saving ---------------------------------------------------------------------------------------------------------
Stash::Stash(std::shared_ptr<DeviceBackend> backend, std::shared_ptr<HostArena> arena, c10::Device device,
             std::optional<Bytes> budget)
    : identity_(new_identity()),
      backend_(std::move(backend)),
      buffers_(std::make_shared<HostBuffers>(std::move(arena))),
      books_(std::make_shared<StashBooks>(budget)),
      device_(device) {}

Stash::~Stash() {
  // Transfers end before the device does, and what they let go may need the interpreter.
  const ReleaseGilIfHeld released;
  backend_->to_host().drain();
  backend_->to_device().drain();
}

bool Stash::can_move(const at::Tensor& tensor) const {
  if (!is_plain(tensor) || tensor.device() != device_ || static_cast<Bytes>(tensor.nbytes()) < kLeastBytes ||
      is_of_leaf(tensor)) {
    return false;
  }
  const Lock lock(books_->mutex());
  const auto found = protected_.find(tensor.storage().unsafeGetStorageImpl());
  return found == protected_.end() || found->second.expired();
}

SavedTensorPtr Stash::pack(const at::Tensor& tensor) {
  auto saved = std::make_shared<SavedTensor>(tensor);
  const Treatment& treatment = current_treatment(identity_);
  const bool movable = can_move(tensor);
  if (treatment.kind == TreatmentKind::kKeep || !movable) {
    saved->kept_ = tensor.detach();  // the tensor itself holds the graph, which would hold itself
    const Lock lock(books_->mutex());
    books_->parts[current_part(identity_)].kept += movable ? static_cast<Bytes>(tensor.nbytes()) : 0;
    ++books_->statistics.tensors;
    ++books_->statistics.kept;
    return saved;
  }
  const c10::Storage& storage = tensor.storage();
  auto [begin, end] = extent_of(tensor);
  const auto whole = static_cast<Bytes>(storage.nbytes());
  if (2 * (end - begin) >= whole) {  // the rest of it will be saved, too, as a rule
    begin = 0;
    end = whole;
  }
  const bool resident = treatment.kind == TreatmentKind::kMoveConvolutionInputs && !use_of(tensor).into_convolution;
  Wishes wishes = treatment.kind == TreatmentKind::kCompress ? Wishes::of(tensor, *treatment.bounds) : Wishes::exact();
  bool to_be_placed = false;
  {
    const Lock lock(books_->mutex());
    ++books_->statistics.tensors;
    saved->interval_ = books_->find(lock, storage, begin, end, saved->mark(), wishes);
    if (saved->interval_ == nullptr) {
      const auto address = reinterpret_cast<std::uintptr_t>(storage.data()) + static_cast<std::uintptr_t>(begin);
      const auto lead = static_cast<Bytes>(address % static_cast<std::uintptr_t>(memory_alignment(device_)));
      saved->interval_ = books_->enter(storage, begin, end - begin, lead, saved->mark(), std::move(wishes), resident);
      saved->interval_->saved_on = stream_of(device_);
      saved->interval_->part = current_part(identity_);
      to_be_placed = !resident;
    } else {
      saved->interval_->wishes.add(wishes);
      if (saved->interval_->state == IntervalState::kResident && !resident) {
        books_->end_residence(saved->interval_);
        to_be_placed = true;
      }
    }
    ++saved->interval_->waiting;
    saved->strides_ = tensor.strides();
    saved->offset_ = tensor.storage_offset() * static_cast<Bytes>(tensor.itemsize()) - saved->interval_->begin;
  }
  if (to_be_placed) {
    place(saved->interval_);
  }
  make_room(0, /*in_backward=*/false);
  const Lock lock(books_->mutex());
  books_->note_peak();
  return saved;
}

void Stash::place(const StashedIntervalPtr& interval) {
  bool waits = false;
  {
    const Lock lock(books_->mutex());
    waits = interval->encodes_at_once && interval->wishes.encodable;
    if (waits) {
      undecided_.push_back(interval);
    }
  }
  decide();
  if (!waits && interval->leaves_at_once) {
    begin_leaving(interval);
  }
}

void Stash::begin_leaving(const StashedIntervalPtr& interval) {
  finish(interval);
  Departure departure;
  {
    const Lock lock(books_->mutex());
    if (interval->state != IntervalState::kOnDevice) {
      return;
    }
    interval->advance(IntervalState::kOnDevice, IntervalState::kLeaving);
    departure = {interval->held, interval->held_begin, interval->bytes, buffer_bytes(*interval)};
  }
  try {
    send(interval, std::move(departure));
  } catch (const OutOfMemory&) {  // it stays where it is, which costs room, and nothing else
    const Lock lock(books_->mutex());
    interval->advance(IntervalState::kLeaving, IntervalState::kStranded);
    ++books_->statistics.stayed;
  } catch (...) {  // re-raised: nothing is to wait for it
    const Lock lock(books_->mutex());
    interval->advance(IntervalState::kLeaving, IntervalState::kStranded);
    throw;
  }
}

void Stash::send(const StashedIntervalPtr& interval, Departure departure) {
  const ReleaseGilIfHeld released;
  ArenaRegionPtr host = buffers_->take(departure.buffer_bytes);
  const Bytes bytes = departure.bytes;
  Job job;
  job.segments = {{host->data(), static_cast<const std::byte*>(departure.storage.data()) + departure.begin, bytes}};
  job.fences = {backend_->record()};
  // The copy may end after all that wanted it.
  job.after = [books = books_, known = std::weak_ptr(interval), storage = std::move(departure.storage), host, bytes]() {
    books->left(known.lock(), host, bytes);
  };
  TicketPtr leaving = backend_->to_host().submit(std::move(job));
  const Lock lock(books_->mutex());
  interval->leaving = std::move(leaving);
}

void Stash::make_room(Bytes bytes, bool in_backward) {
  for (;;) {
    c10::Storage gone;
    StashedIntervalPtr oldest;
    TicketPtr leaving;
    {
      const Lock lock(books_->mutex());
      if (books_->has_room(bytes)) {
        return;
      }
      oldest = books_->oldest_held(lock, in_backward);
      if (!oldest) {
        return;
      }
      leaving = oldest->leaving;
      if (oldest->is_copied()) {
        gone = books_->free_copied(*oldest);
      }
    }
    if (gone) {
      continue;
    }
    if (!leaving) {
      if (!encode(oldest)) {
        begin_leaving(oldest);
      }
      continue;
    }
    const Clock::time_point start = Clock::now();
    {
      const ReleaseGilIfHeld released;
      leaving->wait_quietly();
    }
    const Lock lock(books_->mutex());
    books_->statistics.wait_seconds += seconds_since(start);
  }
}

// ---- life -----------------------------------------------------------------------------------------------------------
void Stash::protect(const std::vector<at::Tensor>& tensors) {
  const Lock lock(books_->mutex());
  std::erase_if(protected_, [](const auto& entry) { return entry.second.expired(); });
  for (const at::Tensor& tensor : tensors) {
    if (tensor.has_storage()) {
      protected_.insert_or_assign(tensor.storage().unsafeGetStorageImpl(), tensor.storage().getWeakStorageImpl());
    }
  }
}

void Stash::close() noexcept {
  buffers_->close();
  room_.clear();
}

std::optional<StashPass> Stash::last_pass() const {
  const Lock lock(books_->mutex());
  return books_->last_pass();
}

std::map<std::int32_t, StashBooks::Part> Stash::parts() const {
  const Lock lock(books_->mutex());
  return books_->parts;
}

std::map<std::string, StashBooks::Exact> Stash::exact() const {
  const Lock lock(books_->mutex());
  return books_->exact;
}

StashStatistics Stash::statistics() const {
  {
    const ReleaseGilIfHeld released;
    backend_->to_host().drain();
    backend_->to_device().drain();
  }
  const Bytes lent = buffers_->lent_bytes();
  const Lock lock(books_->mutex());
  StashStatistics now = books_->statistics;
  now.host_bytes = lent;
  return now;
}

}  // namespace hydra
