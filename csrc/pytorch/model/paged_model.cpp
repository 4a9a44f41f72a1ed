#include "csrc/pytorch/model/paged_model.h"

#include "csrc/base/errors.h"
#include "csrc/memory/limited_resource.h"
#include "csrc/pytorch/gradients/gradient_hooks.h"
#include "csrc/pytorch/memory/counting_allocator.h"
#include "csrc/pytorch/model/fault_path.h"
#include "csrc/pytorch/parameters/overlapping_memory.h"
#include "csrc/pytorch/threads/error_bridge.h"
#include "csrc/pytorch/threads/gil.h"

namespace py = pybind11;

namespace hydra {

PagedModel::PagedModel(std::shared_ptr<DeviceBackend> backend, std::shared_ptr<HostArena> arena,
                       const PagedModelOptions& options)
    : backend_(std::move(backend)),
      arena_(std::move(arena)),
      options_(options),
      account_(std::make_shared<Account>(options.budget)),
      tracked_(std::make_unique<TrackedResource>(backend_->slots())),
      slots_(std::make_unique<LimitedResource>(*tracked_, account_->ledger(), MemoryClass::kWeights)),
      state_memory_(std::make_unique<LimitedResource>(*tracked_, account_->ledger(), MemoryClass::kOptimizer)),
      pager_(std::make_unique<Pager>(*backend_, *slots_, account_->ledger())),
      sink_(std::make_unique<AccumulatingSink>(*backend_, arena_)),
      homes_(*backend_, *pager_, *state_memory_, arena_) {
  register_fault_path();
  sink_->set_transfer_dtype(options.gradient_dtype);
  sink_->set_bound(options.gradient_bound);
  pager_->set_fault_path(options.fault_path);
  pager_->set_reliever([this] { return sink_->relieve(); });
  pager_->set_last_resort([this] {
    const ReleaseGilIfHeld released;
    return homes_.give_one_up();
  });
  account_->open(
      [this] {
        const ReleaseGilIfHeld released;
        try {
          return pager_->evict_one(/*may_wait=*/true);
        } catch (const Error&) {
          rethrow_for_torch({});
        }
      },
      [this] { return explain(); });
  service_ = backend_->serve({options.budget, [this] { return pager_->evict_one(/*may_wait=*/false); }});
  if (std::function<Bytes()> meter = backend_->activation_meter()) {
    pager_->set_activation_meter(std::move(meter));
    // Gradients on their way are activations to the meter until they have left; they cannot be waited for then.
    pager_->set_gradient_reserve(options.gradient_bound);
  }
}

PagedModel::~PagedModel() {
  try {
    close();
  } catch (const std::exception& error) {  // there is no caller to tell
    TORCH_WARN("hydra_ext: an offload context that was not left has lost bytes: ", error.what());
  }
}

std::int32_t PagedModel::add_block(std::string name,
                                   const std::vector<std::pair<std::string, at::Tensor>>& parameters) {
  std::vector<HostParameter*> members;
  for (const auto& [parameter_name, host] : parameters) {
    auto parameter = std::make_unique<HostParameter>();
    parameter->name = parameter_name;
    parameter->host = host;
    parameter->host_dtype = host.scalar_type();
    parameter->page = c10::make_intrusive<Page>();
    parameter->page->name = parameter_name;
    parameter->page->device = options_.device;
    parameter->page->block = static_cast<std::int32_t>(pager_->blocks());
    parameter->page->owner = weak_from_this();
    const bool casts = options_.face_dtype && at::isFloatingType(host.scalar_type());
    parameter->face = make_paged_tensor(parameter->page, host, casts ? *options_.face_dtype : host.scalar_type());
    parameter->paged = parameter->face.detach();
    parameter->face.set_requires_grad(host.requires_grad());
    parameter->trained_seen = host.requires_grad();
    install_gradient_hooks(*parameter, *sink_, gathering_, homes_, [this] { return window_open(); });
    members.push_back(parameter.get());
    parameters_.push_back(std::move(parameter));
  }
  auto backing = std::make_unique<BlockBacking>(std::move(members), arena_);
  backings_.push_back(backing.get());
  block_names_.push_back(name);
  const Bytes bytes = backing->slot_bytes();
  const BlockKey key{static_cast<std::int32_t>(pager_->blocks()), 0};
  return pager_->add_block(key, std::move(name), bytes, std::move(backing));
}

void PagedModel::charge_buffers(Bytes bytes) {
  account_->charge(MemoryClass::kBuffers, bytes);
  buffer_bytes_ += bytes;
}

std::vector<at::Tensor> PagedModel::faces() const {
  std::vector<at::Tensor> faces;
  for (const auto& parameter : parameters_) {
    faces.push_back(parameter->face);
  }
  return faces;
}

// ---- what others say and ask ------------------------------------------------------------------

void PagedModel::refresh() { all_stale_ = true; }
void PagedModel::note_optimizer_step() {
  for (const auto& parameter : parameters_) {
    if (parameter->host.requires_grad() || parameter->host.unsafeGetTensorImpl()->grad().defined()) {
      parameter->moved = true;
    }
  }
}

std::string PagedModel::explain() const {
  const Ledger& ledger = account_->ledger();
  const std::int32_t block = latest_block_;
  const char* pass = open_kind_ == PassKind::kBackward ? "backward" : "forward";
  return "While running " + std::string(pass) +
         (block < 0 ? std::string() : " of block '" + block_names_[static_cast<std::size_t>(block)] + "'") +
         ", the device held weights " + human_bytes(ledger.in_use(MemoryClass::kWeights)) + ", gradients " +
         human_bytes(ledger.in_use(MemoryClass::kGradients)) + ", activations and workspace " +
         human_bytes(ledger.in_use(MemoryClass::kActivations)) + ", buffers " +
         human_bytes(ledger.in_use(MemoryClass::kBuffers)) + ", optimizer state " +
         human_bytes(ledger.in_use(MemoryClass::kOptimizer)) + "; in slots: " + pager_->describe_residents() +
         ". Nothing more can be moved out. Raise the budget; or let activations leave the device, or make them again "
         "(activations=hydra_ext.Offload() or hydra_ext.Recompute(), recompute=True in run.step); or run fewer "
         "microbatches together (round_size= in run.step), name smaller blocks=, or shrink the batch.";
}

Bytes PagedModel::foreign_bytes() const noexcept {
  Bytes bytes = 0;
  for (const BlockBacking* backing : backings_) {
    bytes += backing->foreign_bytes();
  }
  return bytes;
}

void PagedModel::close() {
  if (closed_.exchange(true)) {
    return;
  }
  const py::gil_scoped_acquire locked;  // the last owner may be a thread of autograd's
  if (window_.exit_all()) {
    close_window(/*failed=*/true);
  }
  window_.clear();
  const py::gil_scoped_release released;
  std::exception_ptr lost;
  try {
    bring_home();
  } catch (...) {  // re-raised at the end
    lost = std::current_exception();
    const bool here = home_.here();  // a forked child does not know what is updated, nor has it the threads
    if (here) {
      abandon_update();  // before the memory that it may be working on goes
    }
    homes_.abandon();
    if (here && disk_) {
      disk_->abandon();
    }
  }
  service_.reset();  // before the pager: it must not be asked for room any more
  pager_->close();
  account_->ledger().discharge(MemoryClass::kBuffers, std::exchange(buffer_bytes_, 0));
  account_->close();
  if (home_.here()) {  // where it was forked, a thread that is not here may hold the lock
    overlapping_memory::forget(this);
  }
  arena_->unpin_all();  // the parameters stay in the arena, and are read by forked children again
  for (const auto& parameter : parameters_) {
    clear_gradient_hooks(*parameter);
    parameter->diversion.reset();
    withdraw(*parameter->page, "belonged to an offload context that has ended");
  }
  close_disk();
  if (lost) {
    std::rethrow_exception(lost);
  }
}

}  // namespace hydra
