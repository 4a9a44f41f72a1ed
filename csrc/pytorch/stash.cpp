#include "csrc/pytorch/stash.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/variable.h>

#include <chrono>
#include <cstring>

#include "csrc/base/errors.h"
#include "csrc/pytorch/error_bridge.h"
#include "csrc/pytorch/fault_key.h"
#include "csrc/pytorch/gil.h"

namespace hydra {

namespace autograd = torch::autograd;

namespace {

using Clock = std::chrono::steady_clock;
using Lock = StashBooks::Lock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// torch's memory begins at a multiple of it, and kernels choose their way by what is left over.
Bytes alignment(c10::Device device) { return device.is_cuda() ? kPageAlignment : 64; }

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

thread_local std::vector<Treatment> treatments;

}  // namespace

void begin_treatment(Treatment treatment) { treatments.push_back(treatment); }

void end_treatment() noexcept {
  if (!treatments.empty()) {
    treatments.pop_back();
  }
}

// ---- a saved tensor -------------------------------------------------------------------------------------------------
SavedTensor::SavedTensor(const at::Tensor& tensor)
    : sizes_(tensor.sizes()), dtype_(tensor.dtype()), device_(tensor.device()) {
  if (!tensor.is_inference()) {
    counter_ = autograd::impl::version_counter(tensor);
    version_ = counter_.current_version();
  }
}

VersionMark SavedTensor::mark() const noexcept {
  // torch shows no identity of a counter, but it is nothing else than a pointer.
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  VersionMark mark{nullptr, version_};
  std::memcpy(&mark.counter, &counter_, sizeof mark.counter);
  return mark;
}

void SavedTensor::expect_unchanged() const {
  if (!counter_.enabled()) {
    return;
  }
  const std::uint32_t now = counter_.current_version();
  TORCH_CHECK(
      now == version_,
      "one of the variables needed for gradient computation has been modified by an inplace operation: [",
      device_.is_cuda() ? "torch.cuda." : "torch.", c10::toString(c10::typeMetaToScalarType(dtype_)), "Tensor ",
      at::IntArrayRef(sizes_), "] is at version ", now, "; expected version ", version_,
      " instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
      "torch.autograd.set_detect_anomaly(True).");
}

at::Tensor SavedTensor::over(const c10::Storage& storage, Bytes begin) const {
  const auto backend = storage.device().is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  at::Tensor tensor =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(backend), dtype_);
  auto* const impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(sizes_, strides_, (begin + offset_) / static_cast<Bytes>(dtype_.itemsize()));
  impl->set_version_counter(counter_);
  return tensor;
}

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
  const bool stays = !treatments.empty() && treatments.back() == Treatment::kKeep;
  if (stays || !is_plain(tensor) || tensor.device() != device_ || static_cast<Bytes>(tensor.nbytes()) < kLeastBytes ||
      is_parameter(tensor)) {
    return false;
  }
  const Lock lock(books_->mutex());
  const auto found = protected_.find(tensor.storage().unsafeGetStorageImpl());
  return found == protected_.end() || found->second.expired();
}

SavedTensorPtr Stash::pack(const at::Tensor& tensor) {
  auto saved = std::make_shared<SavedTensor>(tensor);
  if (!can_move(tensor)) {
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
  bool is_new = false;
  {
    const Lock lock(books_->mutex());
    ++books_->statistics.tensors;
    saved->interval_ = books_->find(storage, begin, end, saved->mark());
    is_new = saved->interval_ == nullptr;
    if (is_new) {
      const auto address = reinterpret_cast<std::uintptr_t>(storage.data()) + static_cast<std::uintptr_t>(begin);
      const auto lead = static_cast<Bytes>(address % static_cast<std::uintptr_t>(alignment(device_)));
      saved->interval_ = books_->enter(storage, begin, end - begin, lead, saved->mark());
    }
    ++saved->interval_->waiting;
    saved->strides_ = tensor.strides();
    saved->offset_ = tensor.storage_offset() * static_cast<Bytes>(tensor.itemsize()) - saved->interval_->begin;
  }
  if (is_new) {
    if (saved->interval_->leaves_at_once) {
      begin_leaving(saved->interval_);
    }
    make_room(0);
  }
  return saved;
}

void Stash::begin_leaving(const StashedIntervalPtr& interval) {
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
  ArenaRegionPtr host = buffers_->take(interval->bytes);
  Job job;
  job.segments = {{host->data(), static_cast<const std::byte*>(storage.data()) + interval->begin, interval->bytes}};
  job.fences = {backend_->record()};
  // The copy may end after everybody who wanted it.
  job.after = [books = books_, known = std::weak_ptr(interval), storage = std::move(storage), host]() {
    books->left(known.lock(), host);
  };
  TicketPtr leaving = backend_->to_host().submit(std::move(job));
  const Lock lock(books_->mutex());
  interval->leaving = std::move(leaving);
}

void Stash::make_room(Bytes bytes) {
  for (;;) {
    c10::Storage gone;
    StashedIntervalPtr oldest;
    TicketPtr leaving;
    {
      const Lock lock(books_->mutex());
      if (books_->has_room(bytes)) {
        return;
      }
      oldest = books_->oldest_held();
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
      begin_leaving(oldest);
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

// ---- backward -------------------------------------------------------------------------------------------------------
at::Tensor Stash::unpack(SavedTensor& saved) {
  saved.expect_unchanged();
  if (saved.kept_.defined()) {
    return saved.kept_;
  }
  const auto [storage, begin] = fetched(saved);
  prefetch(saved.interval_->number);
  return saved.over(storage, begin);
}

std::pair<c10::Storage, Bytes> Stash::fetched(SavedTensor& saved) {
  const StashedIntervalPtr& interval = saved.interval_;
  c10::Storage storage;  // from one attempt to the next: what another thread lets go meanwhile stays
  for (;;) {
    c10::Storage before;
    c10::Storage gone;
    TicketPtr arriving;
    {
      const Lock lock(books_->mutex());
      before = std::exchange(storage, books_->alive(*interval));
      arriving = storage ? interval->arriving : nullptr;
      if (storage && !arriving) {
        interval->waiting -= saved.taken_ ? 0 : 1;
        saved.taken_ = true;
        if (interval->waiting == 0 && interval->host) {
          gone = books_->let_go(*interval);  // the caller has it
        }
        return {storage, interval->begin};
      }
    }
    if (arriving) {
      await(interval, *arriving);
    } else {
      make_room(interval->bytes);
      storage = bring(interval, Priority::kFault);
    }
  }
}

void Stash::await(const StashedIntervalPtr& interval, Ticket& arriving) {
  const Clock::time_point start = Clock::now();
  c10::Storage gone;
  std::exception_ptr error;
  try {
    const ReleaseGilIfHeld released;
    backend_->compute_waits(arriving);
  } catch (...) {  // re-raised below, once the next attempt can begin anew
    error = std::current_exception();
  }
  {
    const Lock lock(books_->mutex());
    books_->statistics.backward_wait_seconds += seconds_since(start);
    if (interval->arriving.get() == &arriving) {
      interval->arriving = nullptr;
      if (error) {
        interval->data = nullptr;
        gone = books_->let_go(*interval);
      }
    }
  }
  if (error) {
    try {
      std::rethrow_exception(error);
    } catch (...) {  // re-raised as what Python knows
      rethrow_for_torch("");
      throw;
    }
  }
}

c10::Storage Stash::bring(const StashedIntervalPtr& interval, Priority priority) {
  const at::Tensor memory = at::empty({interval->lead + interval->bytes}, at::TensorOptions(at::kByte).device(device_));
  const c10::Storage& storage = memory.storage();
  FencePtr computed;
  {
    const ReleaseGilIfHeld released;
    computed = backend_->record();
  }
  const Lock lock(books_->mutex());
  if (interval->held) {
    return interval->held;  // another thread was faster
  }
  Job job;
  job.priority = priority;
  job.segments = {
      {static_cast<std::byte*>(storage.mutable_data()) + interval->lead, interval->host->data(), interval->bytes}};
  job.fences = {std::move(computed)};
  job.after = [books = books_, storage, host = interval->host] {
    const Lock counting(books->mutex());
    books->statistics.to_device_bytes += host->bytes();
  };
  books_->hold(interval, storage, interval->lead);
  interval->arriving = backend_->to_device().submit(std::move(job));
  books_->statistics.prefetched += priority == Priority::kPrefetch ? 1 : 0;
  return storage;
}

void Stash::prefetch(std::int64_t before) {
  for (;;) {
    StashedIntervalPtr next;
    {
      const Lock lock(books_->mutex());
      next = books_->latest_away(before);
      if (!next || !books_->has_room(next->bytes)) {
        return;
      }
    }
    before = next->number;
    try {
      bring(next, Priority::kPrefetch);
    } catch (const c10::OutOfMemoryError&) {
      return;  // it comes when it is needed
    }
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

void Stash::close() noexcept { buffers_->close(); }

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
