// The edges of a window: what is checked, brought up to date and swapped when it opens, and brought home when it
// closes.
#include <torch/csrc/autograd/engine.h>

#include "csrc/base/errors.h"
#include "csrc/pytorch/gradients/gradient_hooks.h"
#include "csrc/pytorch/memory/counting_allocator.h"
#include "csrc/pytorch/model/paged_model.h"
#include "csrc/pytorch/threads/gil.h"

namespace py = pybind11;

namespace hydra {

namespace {

/// When a node fails, torch leaves what else was ready in its thread's queue, and with it that part of the graph, until
/// the thread's next backward drops it. Of the rest of the budget a next one may not even have its forward run, so this
/// is the next one: of nothing. The interpreter's lock is held, and the failed backward is over.
void drop_failed_backward() noexcept {
  const py::gil_scoped_release released;
  try {
    torch::autograd::Engine::get_default_engine().execute({}, {}, /*keep_graph=*/false, /*create_graph=*/false,
                                                          /*accumulate_grad=*/true);
  } catch (const std::exception&) {  // torch runs none in a forked child, say: the error on its way says more
  }
}

void append(std::string& list, const char* separator, const std::string& item) {
  list += (list.empty() || item.empty() ? "" : separator) + item;
}

}  // namespace

// ---- in ---------------------------------------------------------------------------------------

void PagedModel::enter(WindowToken& token, PassKind kind) {
  HYDRA_EXPECT(!closed_, StateError, "the offload context of this model has ended");
  const auto gate = lock_without_gil(gate_);
  const bool backward = kind == PassKind::kBackward;
  const Window::Depths before = window_.enter(backward);
  token = {.entered = true,
           .thread = std::this_thread::get_id(),
           .thread_depth = before.thread,
           .charge = exchange_thread_charge({.account = thread_account()}),
           .kind = kind,
           .graph = {}};
  if (backward && before.thread > 0 && !before.in_backward) {
    token.gradients = sink_->statistics().gradients;
  }
  try {
    if (before.total == 0) {
      open_window(kind);
    } else if (before.thread == 0) {
      expect_unmoved_hosts();
    }
  } catch (...) {  // re-raised: it is as if the thread had not come
    if (window_.exit_to(token.thread, before.thread)) {
      window_.show_host();
      reveal_hosts();
      backend_->activity().end_pass();
    }
    exchange_thread_charge(std::move(token.charge));
    token.entered = false;
    throw;
  }
}

void PagedModel::open_window(PassKind kind) {
  expect_disk_here();
  const std::string changes = window_.changes();
  HYDRA_EXPECT(changes.empty(), ModelChanged,
               "the model changed inside its offload context: " + changes +
                   ". Leave the context, change the model, and enter it again");
  open_kind_ = kind;
  backend_->activity().begin_pass(kind);
  note_memory();
  {
    const py::gil_scoped_release released;
    if (kind == PassKind::kBackward) {
      finish_update();  // the last step's gradients are free again
    } else {
      settle_update();
    }
    homes_.review();
    review_disk();
    keep_headroom();
    synchronise_hosts();
    if (options_.poison_hosts) {
      for (BlockBacking* backing : backings_) {
        backing->take_aside();
      }
      for (BlockBacking* backing : backings_) {
        backing->conceal();
      }
    }
  }
  window_.show_device();
  const py::gil_scoped_release released;
  pager_->begin_pass(kind, version_);
}

void PagedModel::expect_unmoved_hosts() const {
  const std::string moved = moved_hosts();
  HYDRA_EXPECT(moved.empty(), StateError,
               "something wrote to " + moved +
                   " while another thread was inside the model, which went on with the values from before, and saw "
                   "device parameters in the model's place of host parameters meanwhile. Let no thread be inside "
                   "the model's forward or backward when another one writes its weights");
}

std::string PagedModel::moved_hosts() const {
  std::string names;
  for (const auto& parameter : parameters_) {
    if (parameter->version() != parameter->version_seen) {
      append(names, ", ", "'" + parameter->name + "'");
    }
  }
  return names;
}

bool PagedModel::synchronise(HostParameter& parameter, bool all_stale, std::string& mismatches) {
  if (const WithheldPtr others = parameter.withheld() ? nullptr : withheld_of(parameter.host)) {
    if (const std::shared_ptr<PagedModel> owner = others->owner.lock()) {
      owner->bring_home(others->block, parameter.host.storage());
    }
  }
  const std::string mismatch = parameter.mismatch();
  if (!mismatch.empty()) {
    append(mismatches, "; ", mismatch);
    return false;
  }
  follow_training(parameter);
  if (!parameter.changed_since_seen() && !all_stale) {
    return false;
  }
  parameter.note_seen();
  return true;
}

void PagedModel::follow_training(HostParameter& parameter) {
  parameter.trained_seen = parameter.host.requires_grad();
  if (parameter.face.requires_grad() != parameter.trained_seen) {
    parameter.face.set_requires_grad(parameter.trained_seen);
  }
  if (parameter.trained_seen && !parameter.diversion) {
    parameter.diversion = divert_host_gradients(parameter, *sink_, [this] { return window_open(); });
  }
}

void PagedModel::synchronise_hosts() {
  const bool all_stale = all_stale_.exchange(false);
  spread_moves();
  std::string mismatches;
  for (std::size_t block = 0; block < backings_.size(); ++block) {
    bool stale = false;
    if (homes_.holds(static_cast<std::int32_t>(block))) {
      synchronise_home(*backings_[block]);
      continue;
    }
    for (HostParameter* parameter : backings_[block]->parameters()) {
      stale = synchronise(*parameter, all_stale, mismatches) || stale;
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

void PagedModel::synchronise_home(const BlockBacking& backing) {
  for (HostParameter* parameter : backing.parameters()) {
    follow_training(*parameter);
    parameter->changed_since_seen();  // the face's version follows
    parameter->note_seen();
  }
}

void PagedModel::synchronise_for_fault(std::int32_t block) {
  const auto gate = lock_without_gil(gate_);
  const ReleaseGilIfHeld released;
  if (!closed_ && !window_open() && !homes_.holds(block)) {
    synchronise_block(block);
  }
}

bool PagedModel::synchronise_block(std::int32_t block) {
  BlockBacking& backing = *backings_[static_cast<std::size_t>(block)];
  spread_moves();
  std::string mismatches;
  bool stale = false;
  for (HostParameter* parameter : backing.parameters()) {
    stale = synchronise(*parameter, all_stale_, mismatches) || stale;
  }
  if (stale) {
    backing.host_changed();
    pager_->invalidate(block);
  }
  return mismatches.empty();
}

// ---- out --------------------------------------------------------------------------------------

void PagedModel::returns(WindowToken& token, const std::vector<at::Tensor>& outputs) {
  token.graph = marks_.mark(outputs, {}, shared_from_this());
}

void PagedModel::restore_charge(WindowToken& token, bool failed) {
  const bool inside_another = token.charge.account != nullptr && !token.charge.while_graph_lives;
  if (token.kind == PassKind::kBackward && !inside_another) {
    exchange_thread_charge({});  // it ends what the forward began
  } else if (!token.charge.account && !failed && !token.graph.expired()) {
    exchange_thread_charge({thread_account(), true, token.graph});
  } else {
    exchange_thread_charge(std::move(token.charge));  // a loss of two models belongs to the one that ran first
  }
}

void PagedModel::exit(WindowToken& token, bool failed) {
  if (!std::exchange(token.entered, false)) {
    return;
  }
  auto gate = lock_without_gil(gate_);
  const bool last = window_.exit_to(token.thread, token.thread_depth);
  if (token.thread_depth == 0 && token.thread == std::this_thread::get_id()) {
    restore_charge(token, failed);
  }
  const bool backward = token.kind == PassKind::kBackward;
  try {
    if (last) {
      close_window(failed);
    } else if (backward && !failed && (token.thread_depth == 0 || token.gradients)) {
      const py::gil_scoped_release released;
      collect_assigned_gradients();
      sink_->drain();  // another thread goes on inside, but this one's gradients are to be there
      HYDRA_EXPECT(!token.gradients || *token.gradients == sink_->statistics().gradients, StateError,
                   "backward() inside the model's own forward has summed gradients into its parameters, which are "
                   "device parameters there: neither clipping nor an optimizer would find them. Offload the inner "
                   "module in place of the one around it");
    }
  } catch (...) {  // re-raised: the gradients did not all come
    const py::gil_scoped_release released;
    sink_->run_hooks(/*failed=*/true);
    throw;
  }
  gate.unlock();  // hooks may run the model
  if (backward) {
    const py::gil_scoped_release released;
    sink_->run_hooks(failed);
  }
}

void PagedModel::close_window(bool failed) {
  struct PassEnd {
    PagedModel& model;
    ~PassEnd() {
      model.note_memory();
      model.backend_->activity().end_pass();
    }
  } const pass_end{*this};
  window_.show_host();
  const py::gil_scoped_release released;
  leave(exchange_backward_blocks({}));
  end_stay();
  reopen_gradients();
  pager_->end_pass(!failed);
  std::exception_ptr error;
  try {
    pager_->write_back_dirty();
    collect_assigned_gradients();
    sink_->drain();
    store_gradients();
  } catch (...) {  // re-raised below, once the hosts are as they were
    error = std::current_exception();
  }
  std::string lost;
  if (options_.poison_hosts || open_kind_ != PassKind::kBackward) {  // hooks of inner backwards may write
    lost = moved_hosts();
    lost = lost.empty() ? lost
                        : "something wrote to " + lost + " while " +
                              (options_.poison_hosts ? "Checks(poison_hosts=True) had the values aside, and the write "
                                                       "is lost"
                                                     : "the forward ran, which went on with the values from before") +
                              ". ";
  }
  reveal_hosts();
  if (!error) {
    note_written_home();
  }
  lost += settle_faces();
  settle_update();
  if (error && !failed) {
    std::rethrow_exception(error);
  }
  HYDRA_EXPECT(failed || lost.empty(), ModelChanged, lost);
}

void PagedModel::collect_assigned_gradients() {
  for (const auto& parameter : parameters_) {
    at::Tensor& assigned = parameter->face.unsafeGetTensorImpl()->mutable_grad();
    if (assigned.defined()) {
      hand_over(*parameter, std::exchange(assigned, {}));
    }
  }
}

void Windows::enter() {
  try {
    for (const auto& model : models_) {
      entered_.emplace_back();
      model->enter(entered_.back(), kind_);
    }
  } catch (...) {  // re-raised: none is entered
    exit(/*failed=*/true);
    throw;
  }
}

void Windows::exit(bool failed) {
  std::exception_ptr error;
  while (!entered_.empty()) {
    WindowToken token = std::move(entered_.back());
    entered_.pop_back();
    try {
      models_[entered_.size()]->exit(token, failed || error != nullptr);
    } catch (...) {  // re-raised below
      error = error ? error : std::current_exception();
    }
  }
  if (failed) {
    drop_failed_backward();
  }
  if (error) {
    std::rethrow_exception(error);
  }
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

}  // namespace hydra
