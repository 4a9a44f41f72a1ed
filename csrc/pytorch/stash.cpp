#include "csrc/pytorch/stash.h"

#include <ATen/ops/clone.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <bit>
#include <chrono>

#include "csrc/base/errors.h"
#include "csrc/pytorch/fault_key.h"
#include "csrc/pytorch/gil.h"
#include "csrc/pytorch/treatment.h"

namespace hydra {

namespace autograd = torch::autograd;

namespace {

using Clock = std::chrono::steady_clock;
using Lock = StashBooks::Lock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

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

bool is_parameter(const at::Tensor& tensor) {
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

/// A GPU's kernels take memory from multiples of 16 bytes on.
bool can_encode(const DeviceBytes& from) {
  constexpr std::uintptr_t kMultiple = 16;
  return from.device.is_cpu() || reinterpret_cast<std::uintptr_t>(from.data) % kMultiple == 0;
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
    : backend_(std::move(backend)),
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
      is_parameter(tensor)) {
    return false;
  }
  const Lock lock(books_->mutex());
  const auto found = protected_.find(tensor.storage().unsafeGetStorageImpl());
  return found == protected_.end() || found->second.expired();
}

SavedTensorPtr Stash::pack(const at::Tensor& tensor) {
  auto saved = std::make_shared<SavedTensor>(tensor);
  const Treatment& treatment = current_treatment();
  if (treatment.kind == TreatmentKind::kKeep || !can_move(tensor)) {
    saved->kept_ = tensor.detach();  // the tensor itself holds the graph, which would hold itself
    const Lock lock(books_->mutex());
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
    saved->interval_ = books_->find(storage, begin, end, saved->mark(), wishes);
    if (saved->interval_ == nullptr) {
      const auto address = reinterpret_cast<std::uintptr_t>(storage.data()) + static_cast<std::uintptr_t>(begin);
      const auto lead = static_cast<Bytes>(address % static_cast<std::uintptr_t>(memory_alignment(device_)));
      saved->interval_ = books_->enter(storage, begin, end - begin, lead, saved->mark(), std::move(wishes), resident);
      to_be_placed = !resident;
    } else {
      saved->interval_->wishes.add(wishes);
      if (saved->interval_->resident && !resident) {
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

void Stash::decide() {
  for (;;) {
    const auto [interval, is_made] = next_to_decide();
    if (!interval) {
      return;
    }
    if (!is_made) {
      encode(interval);
    }
    bool leaves = false;
    {
      const Lock lock(books_->mutex());
      leaves = interval->leaves_at_once && (is_made || !interval->in_making);
    }
    if (leaves) {
      begin_leaving(interval);
    } else if (is_made) {
      finish(interval);
    }
  }
}

std::pair<StashedIntervalPtr, bool> Stash::next_to_decide() {
  constexpr std::size_t kInMaking = 3;
  const Lock lock(books_->mutex());
  for (; !in_making_.empty(); in_making_.pop_front()) {
    StashedIntervalPtr oldest = in_making_.front().lock();
    if (!oldest || !oldest->in_making) {
      continue;
    }
    if (!oldest->made->reached() && in_making_.size() <= kInMaking) {
      break;
    }
    in_making_.pop_front();
    return {std::move(oldest), true};
  }
  for (; !undecided_.empty(); undecided_.pop_front()) {
    StashedIntervalPtr oldest = undecided_.front().lock();
    if (!oldest) {
      continue;
    }
    if (books_->is_newest(*oldest)) {
      break;
    }
    undecided_.pop_front();
    return {std::move(oldest), false};
  }
  return {};
}

bool Stash::encode(const StashedIntervalPtr& interval) {
  CoderPtr coder;
  c10::Storage storage;
  DeviceBytes from;
  {
    const Lock lock(books_->mutex());
    if (interval->sealed || interval->begun_to_leave || !interval->held || interval->resident) {
      return false;
    }
    coder = interval->wishes.coder(device_, interval->raw_bytes);
    storage = interval->held;
    from = {static_cast<const std::byte*>(storage.data()) + interval->held_begin, interval->raw_bytes, device_};
    if (!coder || !can_encode(from)) {
      return false;
    }
    interval->sealed = true;
  }
  Encoded encoded;
  FencePtr made;
  const char* refusal = nullptr;
  try {
    encoded = coder->encode(from, room_);
    made = encoded.header.defined() ? backend_->record() : nullptr;
    if (!encoded.stream.defined()) {
      refusal = "an index outside its window";
    } else if (!made && encoded.length() > interval->raw_bytes / 16 * 15) {
      refusal = "does not become smaller";
    }
  } catch (const c10::OutOfMemoryError&) {
    refusal = "no memory to encode it in";
  }
  c10::Storage gone;
  const Lock lock(books_->mutex());
  if (refusal != nullptr) {
    interval->sealed = false;
    interval->wishes.encodable = false;
    interval->wishes.exact_for = refusal;
    return false;
  }
  const Bytes length = made ? encoded.stream.numel() : encoded.length();
  gone = books_->become_stream(interval, std::move(coder), encoded.stream.storage(), length);
  if (made) {
    interval->in_making = std::move(encoded);
    interval->made = std::move(made);
    in_making_.push_back(interval);
  } else {
    interval->wishes.count(interval->raw_bytes, length);
  }
  return true;
}

void Stash::finish(const StashedIntervalPtr& interval) {
  const auto made_of = [&]() -> std::pair<std::optional<Encoded>, FencePtr> {
    const Lock lock(books_->mutex());
    return {interval->in_making, interval->made};
  };
  if (!made_of().first) {
    return;
  }
  const auto alone = lock_without_gil(finishing_);
  const auto [encoded, made] = made_of();
  if (!encoded) {
    return;
  }
  {
    const ReleaseGilIfHeld released;
    made->wait();
  }
  const Bytes length = encoded->length();
  at::Tensor exact = encoded->stream;
  try {
    exact = encoded->stream.narrow(0, 0, length).clone();
  } catch (const c10::OutOfMemoryError&) {  // it stays in the memory that it was made in
  }
  c10::Storage gone;
  const Lock lock(books_->mutex());
  gone = books_->shorten(interval, exact.storage(), length);
  interval->wishes.count(interval->raw_bytes, length);
  interval->in_making.reset();
  interval->made = nullptr;
}

void Stash::begin_leaving(const StashedIntervalPtr& interval) {
  finish(interval);
  c10::Storage storage;
  {
    const Lock lock(books_->mutex());
    if (interval->begun_to_leave || !interval->held) {
      return;
    }
    interval->begun_to_leave = true;
    storage = interval->held;
  }
  try {
    send(interval, std::move(storage));
  } catch (const OutOfMemory&) {  // it stays where it is, which costs room, and nothing else
    const Lock lock(books_->mutex());
    interval->stays = true;
    ++books_->statistics.stayed;
  } catch (...) {  // re-raised: nobody is to wait for it
    const Lock lock(books_->mutex());
    interval->stays = true;
    throw;
  }
}

void Stash::send(const StashedIntervalPtr& interval, c10::Storage storage) {
  const ReleaseGilIfHeld released;
  const Bytes bytes = interval->bytes;  // it has begun to leave, and so does not change
  ArenaRegionPtr host = buffers_->take(buffer_bytes(*interval));
  Job job;
  job.segments = {{host->data(), static_cast<const std::byte*>(storage.data()) + interval->held_begin, bytes}};
  job.fences = {backend_->record()};
  // The copy may end after everybody who wanted it.
  job.after = [books = books_, known = std::weak_ptr(interval), storage = std::move(storage), host, bytes]() {
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
      oldest = books_->oldest_held(in_backward);
      if (!oldest) {
        return;
      }
      leaving = oldest->leaving;
      if (oldest->host) {
        gone = books_->let_go(*oldest);
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
