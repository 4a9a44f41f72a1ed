#include "csrc/pytorch/paged_model.h"

#include "csrc/base/errors.h"
#include "csrc/memory/limited_resource.h"
#include "csrc/pytorch/counting_allocator.h"
#include "csrc/pytorch/error_bridge.h"
#include "csrc/pytorch/fault_path.h"
#include "csrc/pytorch/gil.h"

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
      pager_(std::make_unique<Pager>(*backend_, *slots_, account_->ledger())),
      sink_(std::make_unique<AccumulatingSink>(*backend_, arena_)) {
  register_fault_path();
  sink_->set_transfer_dtype(options.gradient_dtype);
  sink_->set_bound(options.gradient_bound);
  pager_->set_fault_path(options.fault_path);
  pager_->set_reliever([this] { return sink_->relieve(); });
  account_->open(
      [this] {
        const ReleaseGilIfHeld released;
        return pager_->evict_one(/*may_wait=*/true);
      },
      [this] { return explain(); });
  service_ = backend_->serve({options.budget, [this] { return pager_->evict_one(/*may_wait=*/false); }});
  if (std::function<Bytes()> meter = backend_->activation_meter()) {
    pager_->set_activation_meter(std::move(meter));
    // Gradients on their way are activations to the meter until they have left; nobody can wait for them then.
    pager_->set_gradient_reserve(options.gradient_bound);
  }
}

PagedModel::~PagedModel() { close(); }

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
    install_gradient_hooks(*parameter, *sink_, gathering_);
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

std::vector<at::Tensor> PagedModel::faces() const {
  std::vector<at::Tensor> faces;
  for (const auto& parameter : parameters_) {
    faces.push_back(parameter->face);
  }
  return faces;
}

// ---- the window -------------------------------------------------------------------------------

void PagedModel::enter(WindowToken& token, PassKind kind) {
  HYDRA_EXPECT(!closed_, StateError, "the offload context of this model has ended");
  std::unique_lock gate(gate_, std::defer_lock);
  {
    const py::gil_scoped_release released;
    gate.lock();
  }
  const Window::Depths before = window_.enter();
  token = {true, before.thread, exchange_thread_account(thread_account()), kind};
  if (before.total == 0) {
    try {
      open_window(kind);
    } catch (...) {  // re-raised: nobody is inside
      window_.exit_to(before.thread);
      window_.show_host();
      reveal_hosts();
      exchange_thread_account(token.account);
      token.entered = false;
      throw;
    }
  }
}

void PagedModel::open_window(PassKind kind) {
  const std::string changes = window_.changes();
  HYDRA_EXPECT(changes.empty(), ModelChanged,
               "the model changed inside its offload context: " + changes +
                   ". Leave the context, change the model, and enter it again");
  open_kind_ = kind;
  {
    const py::gil_scoped_release released;
    synchronise_hosts();
    if (options_.poison_hosts) {
      for (BlockBacking* backing : backings_) {
        backing->conceal();
      }
    }
  }
  window_.show_device();
  const py::gil_scoped_release released;
  pager_->begin_pass(kind);
}

void PagedModel::synchronise_hosts() {
  const bool all_stale = all_stale_.exchange(false);
  const bool trainable_stale = trainable_stale_.exchange(false);
  std::string mismatches;
  for (std::size_t block = 0; block < backings_.size(); ++block) {
    bool stale = false;
    for (HostParameter* parameter : backings_[block]->parameters()) {
      const std::string mismatch = parameter->mismatch();
      if (!mismatch.empty()) {
        mismatches += (mismatches.empty() ? "" : "; ") + mismatch;
        continue;
      }
      const bool trained = parameter->face.requires_grad() || parameter->host.requires_grad();
      parameter->trained_seen = parameter->host.requires_grad();
      if (parameter->face.requires_grad() != parameter->trained_seen) {
        parameter->face.set_requires_grad(parameter->trained_seen);
      }
      if (parameter->trained_seen && !parameter->diversion) {
        parameter->diversion = divert_host_gradients(*parameter, *sink_, [this] { return window_open(); });
      }
      if (parameter->changed_since_seen() || all_stale || (trainable_stale && trained)) {
        parameter->note_seen();
        stale = true;
      }
    }
    if (stale) {
      backings_[block]->host_changed();
      pager_->invalidate(static_cast<std::int32_t>(block));
    }
  }
  if (!mismatches.empty()) {
    all_stale_ = true;  // those that differ were not brought up to date
  }
  HYDRA_EXPECT(mismatches.empty(), ModelChanged,
               "parameters changed inside the offload context: " + mismatches +
                   ". Leave the context, change them, and enter it again");
}

void PagedModel::exit(WindowToken& token, bool failed) {
  if (!std::exchange(token.entered, false)) {
    return;
  }
  std::unique_lock gate(gate_, std::defer_lock);
  {
    const py::gil_scoped_release released;
    gate.lock();
  }
  const bool last = window_.exit_to(token.thread_depth);
  if (token.thread_depth == 0) {
    // Backward ends what the forward began; a loss between the two belongs to the model that ran first.
    const bool loss_follows = token.kind == PassKind::kForward && !failed;
    const AccountPtr next = loss_follows && !token.account ? thread_account() : token.account;
    exchange_thread_account(token.kind == PassKind::kBackward ? nullptr : next);
  }
  if (last) {
    close_window(failed);
  } else if (token.kind == PassKind::kBackward && token.thread_depth == 0 && !failed) {
    const py::gil_scoped_release released;
    sink_->drain();  // other threads go on, but this one's gradients are to be there
  }
}

void PagedModel::close_window(bool failed) {
  window_.show_host();
  const py::gil_scoped_release released;
  leave(exchange_backward_blocks({}));
  end_stay();
  pager_->end_pass(!failed);
  std::exception_ptr error;
  try {
    pager_->write_back_dirty();
    sink_->drain();
  } catch (...) {  // re-raised below, once the hosts are as they were
    error = std::current_exception();
  }
  reveal_hosts();
  if (!error) {
    note_written_home();
  }
  const std::string lost = settle_faces();
  if (error && !failed) {
    std::rethrow_exception(error);
  }
  HYDRA_EXPECT(failed || lost.empty(), ModelChanged, lost);
}

void PagedModel::reveal_hosts() noexcept {
  for (BlockBacking* backing : backings_) {
    backing->reveal();
  }
}

std::string PagedModel::settle_faces() {
  const at::NoGradGuard no_grad;
  const HostScope on_the_host;
  std::string lost;
  for (const auto& parameter : parameters_) {
    const bool trained = parameter->face.requires_grad();
    if (trained != parameter->trained_seen) {
      parameter->host.set_requires_grad(trained);
    }
    if (!parameter->detached()) {
      continue;
    }
    if (parameter->same_dtype() && parameter->mismatch().empty()) {
      parameter->host.copy_(parameter->face);
    } else {
      lost += (lost.empty() ? "" : "; ") +
              ("the forward gave '" + parameter->name +
               "' data of another dtype or shape, which its host parameter cannot take; do that outside the forward");
    }
    parameter->attach();
  }
  return lost;
}

void PagedModel::note_written_home() {
  for (const auto& parameter : parameters_) {
    if (parameter->page->written) {
      parameter->page->written = false;
      parameter->host.unsafeGetTensorImpl()->bump_version();
      parameter->note_seen();  // the slot holds the same
    }
  }
}

// ---- blocks -----------------------------------------------------------------------------------

void PagedModel::begin_visit(SiteVisit& visit, const BlockList& blocks, PassKind kind) {
  if (window_.depths().thread == 0) {
    enter(visit.window, kind);
  }
  const py::gil_scoped_release released;
  if (!stays_in(blocks)) {
    arrive(blocks, kind);
    visit.blocks = blocks;
  }
}

void PagedModel::end_visit(SiteVisit& visit, bool failed) {
  {
    const py::gil_scoped_release released;
    leave(std::exchange(visit.blocks, {}));
  }
  exit(visit.window, failed);
}

void PagedModel::record_timeline(std::size_t samples) {
  const std::lock_guard lock(timeline_mutex_);
  timeline_room_ = timeline_.size() + samples;
  timeline_.reserve(timeline_room_);
}

std::vector<MemorySample> PagedModel::timeline() const {
  const std::lock_guard lock(timeline_mutex_);
  return timeline_;
}

void PagedModel::note_timeline(std::int32_t block, PassKind kind) {
  const std::lock_guard lock(timeline_mutex_);
  if (timeline_.size() >= timeline_room_) {
    return;
  }
  MemorySample sample{kind, block, {}};
  const Ledger& ledger = account_->ledger();
  for (std::size_t i = 0; i < kMemoryClasses; ++i) {
    sample.use.by_class[i] = ledger.in_use(static_cast<MemoryClass>(i));
    sample.use.total += sample.use.by_class[i];
  }
  timeline_.push_back(sample);
}

void PagedModel::arrive(const BlockList& blocks, PassKind kind) {
  std::size_t arrived = 0;
  try {
    for (; arrived < blocks.size(); ++arrived) {
      latest_block_ = blocks[arrived];
      pager_->arrive(blocks[arrived]);
      note_timeline(blocks[arrived], kind);
    }
  } catch (...) {  // re-raised: all or none
    leave({blocks.begin(), blocks.begin() + static_cast<std::ptrdiff_t>(arrived)});
    rethrow_for_torch(explain());
  }
}

void PagedModel::leave(const BlockList& blocks) noexcept {
  for (const std::int32_t block : blocks) {
    dropped_copies_ += derived_pages_.drop(block);
    pager_->release(block, AcquireReason::kHook);
  }
}

BlockList PagedModel::exchange_backward_blocks(BlockList next) {
  const std::lock_guard lock(backward_mutex_);
  return std::exchange(backward_blocks_, std::move(next));
}

void PagedModel::arrive_backward(const BlockList& blocks) {
  if (closed_ || stays_in(blocks)) {
    return;
  }
  exchange_thread_account(thread_account());  // one backward may run through several models
  leave(exchange_backward_blocks({}));
  arrive(blocks, PassKind::kBackward);
  leave(exchange_backward_blocks(blocks));
}

void PagedModel::refresh() { all_stale_ = true; }
void PagedModel::note_optimizer_step() { trainable_stale_ = true; }

void PagedModel::note_face_written(const Page& page) {
  const auto& backing = *backings_[static_cast<std::size_t>(page.block)];
  for (const HostParameter* parameter : backing.parameters()) {
    if (parameter->page.get() == &page) {
      TORCH_CHECK(parameter->same_dtype(), "hydra_ext: the forward writes in place to '", page.name,
                  "', whose device copy is ", parameter->face.scalar_type(), " and whose truth on the host is ",
                  parameter->host.scalar_type(), "; the write would be lost. Leave param_dtype unset for this model");
      parameter->page->written = true;
    }
  }
  pager_->mark_dirty(page.block);
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
         human_bytes(ledger.in_use(MemoryClass::kBuffers)) + "; in slots: " + pager_->describe_residents() +
         ". Nothing more can be moved out. Raise the budget, shrink the batch, or checkpoint activations "
         "(torch.utils.checkpoint).";
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
  const ReleaseGilIfHeld released;
  service_.reset();  // before the pager: it must not be asked for room any more
  pager_->close();
  account_->close();
  arena_->unpin_all();  // the parameters stay in the arena, and are read by forked children again
  for (const auto& parameter : parameters_) {
    clear_gradient_hooks(*parameter);
    parameter->diversion.reset();
    withdraw(*parameter->page, "belonged to an offload context that has ended");
  }
}

}  // namespace hydra
