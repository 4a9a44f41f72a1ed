#include "csrc/pytorch/model/model_window.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <exception>
#include <utility>

#include "csrc/base/errors.h"
#include "csrc/pytorch/model/paged_model.h"
#include "csrc/pytorch/threads/gil.h"

namespace py = pybind11;

namespace hydra {

namespace {

constexpr int kNoGraphTask = -1;  // as torch says it

/// Frees the graph of a failed backward. When a node fails, torch leaves the other ready nodes in its thread's queue,
/// and keeps their part of the graph alive until the thread's next backward. The memory that remains may not even let
/// the next forward run, so this runs an empty backward now. Called with the interpreter lock, after the failed
/// backward.
void drop_failed_backward() noexcept {
  const py::gil_scoped_release released;
  try {
    torch::autograd::Engine::get_default_engine().execute({}, {}, /*keep_graph=*/false, /*create_graph=*/false,
                                                          /*accumulate_grad=*/true);
  } catch (const std::exception&) {  // torch may refuse, as in a forked child; the error on its way says more
  }
}

}  // namespace

// ---- in ---------------------------------------------------------------------------------------

void ModelWindow::enter(WindowToken& token, PassKind kind) {
  WindowGate& gate = model_.gate();
  HYDRA_EXPECT(!gate.closed(), StateError, "the offload context of this model has ended");
  const auto held = gate.hold();
  const bool backward = kind == PassKind::kBackward;
  const bool inner =
      backward && gate.swap().in_backward() && torch::autograd::get_current_graph_task_id() != kNoGraphTask;
  const Window::Depths before = gate.swap().enter(backward);
  token = {.entered = true,
           .thread = std::this_thread::get_id(),
           .thread_depth = before.thread,
           .charge = exchange_thread_charge({.account = model_.memory().charged()}),
           .kind = kind,
           .inner = inner,
           .graph = {}};
  if (backward && before.thread > 0 && !before.in_backward) {
    token.gradients = model_.gradients().sink().statistics().gradients;
  }
  try {
    if (before.total == 0) {
      open_window(kind);
    } else if (before.thread == 0) {
      expect_unmoved_hosts();
    }
  } catch (...) {  // re-raised: the thread's state is as before
    if (gate.swap().exit_to(token.thread, before.thread)) {
      gate.swap().show_host();
      model_.changes().reveal();
      model_.memory().backend().activity().end_pass();
    }
    exchange_thread_charge(std::move(token.charge));
    token.entered = false;
    throw;
  }
  if (before.thread == 0) {
    model_.changes().note_entry();
  }
}

void ModelWindow::open_window(PassKind kind) {
  model_.homes().disk().expect_here();
  const std::string changes = model_.gate().swap().changes();
  HYDRA_EXPECT(changes.empty(), ModelChanged,
               "the model changed inside its offload context: " + changes +
                   ". Leave the context, change the model, and enter it again");
  model_.pager().passes().expect_usable();
  model_.arrivals().timeline().begin_pass(kind);
  {
    const py::gil_scoped_release released;
    PendingUpdate& update = model_.update();
    if (kind == PassKind::kBackward) {
      update.finish();  // the last step's gradients are free again
    } else {
      update.reap();
    }
    model_.moves().review();
    model_.changes().synchronise();
    model_.changes().conceal();
  }
  model_.gate().swap().show_device();
  const py::gil_scoped_release released;
  model_.pager().passes().begin(kind, model_.arrivals().version());
}

void ModelWindow::expect_unmoved_hosts() const {
  const std::string moved = model_.changes().moved();
  HYDRA_EXPECT(moved.empty(), StateError,
               "something wrote to " + moved +
                   " while another thread was inside the model. That thread went on with the old values, and the model "
                   "showed device parameters in place of host parameters meanwhile. Let no thread be inside "
                   "the model's forward or backward when another one writes its weights");
}

// ---- inside -----------------------------------------------------------------------------------

void ModelWindow::begin_visit(SiteVisit& visit, const BlockList& blocks, PassKind kind) {
  if (model_.gate().swap().depths().thread == 0) {
    enter(visit.window, kind);
  }
  const py::gil_scoped_release released;
  if (!model_.rounds().includes(blocks)) {
    model_.arrivals().arrive(blocks, kind);
    visit.blocks = blocks;
    visit.begin = model_.memory().backend().activity().now();
  }
}

void ModelWindow::returns(SiteVisit& visit, const std::vector<at::Tensor>& outputs) {
  visit.window.graph = marks_.mark(outputs, visit.blocks, model_.shared_from_this());
}

void ModelWindow::end_visit(SiteVisit& visit, bool failed) {
  {
    const py::gil_scoped_release released;
    model_.arrivals().timeline().note_compute(visit.blocks, visit.begin);
    model_.arrivals().leave(std::exchange(visit.blocks, {}));
  }
  exit(visit.window, failed);
}

// ---- out --------------------------------------------------------------------------------------

void ModelWindow::returns(WindowToken& token, const std::vector<at::Tensor>& outputs) {
  token.graph = marks_.mark(outputs, {}, model_.shared_from_this());
}

void ModelWindow::restore_charge(WindowToken& token, bool failed) const {
  const bool inside_another = token.charge.account != nullptr && !token.charge.while_graph_lives;
  if (token.kind == PassKind::kBackward && !inside_another) {
    exchange_thread_charge({});  // ends the charge that the forward began
  } else if (!token.charge.account && !failed && !token.graph.expired()) {
    exchange_thread_charge({model_.memory().charged(), true, token.graph});
  } else {
    exchange_thread_charge(std::move(token.charge));  // a loss of two models is charged to the one that ran first
  }
}

void ModelWindow::exit(WindowToken& token, bool failed) {
  if (!std::exchange(token.entered, false)) {
    return;
  }
  AccumulatingSink& sink = model_.gradients().sink();
  auto held = model_.gate().hold();
  const bool last = model_.gate().swap().exit_to(token.thread, token.thread_depth);
  if (token.thread_depth == 0 && token.thread == std::this_thread::get_id()) {
    restore_charge(token, failed);
  }
  const bool backward = token.kind == PassKind::kBackward;
  try {
    if (last) {
      close_window(failed);
    } else if (backward && !failed && ((token.thread_depth == 0 && !token.inner) || token.gradients)) {
      const py::gil_scoped_release released;
      model_.gradients().collect_assigned();
      sink.drain();  // another thread is still inside, but this thread's gradients have to be complete
      HYDRA_EXPECT(!token.gradients || *token.gradients == sink.statistics().gradients, StateError,
                   "backward() inside the model's own forward has summed gradients into its parameters, which are "
                   "device parameters there: neither clipping nor an optimizer would find them. Offload the inner "
                   "module instead of the outer one");
    }
  } catch (...) {  // re-raised: not all gradients have arrived
    const py::gil_scoped_release released;
    sink.run_hooks(/*failed=*/true);
    throw;
  }
  held.unlock();  // hooks may run the model
  if (backward) {
    const py::gil_scoped_release released;
    sink.run_hooks(failed);
  }
}

void ModelWindow::close_window(bool failed) {
  struct PassEnd {
    MemoryTimeline& timeline;
    ~PassEnd() { timeline.end_pass(); }
  } const pass_end{model_.arrivals().timeline()};
  model_.gate().swap().show_host();
  const py::gil_scoped_release released;
  model_.rounds().end();
  model_.gradients().reopen();
  model_.pager().passes().end(!failed);
  std::exception_ptr error;
  try {
    model_.pager().contents().write_back_dirty();
    model_.gradients().collect_assigned();
    model_.gradients().sink().drain();
    model_.gradients().spill().store_all();
  } catch (...) {  // re-raised below, once the hosts are revealed again
    error = std::current_exception();
  }
  std::string lost = writes_to_hosts();
  model_.changes().reveal();
  if (!error) {
    model_.changes().note_written_home();
  }
  lost += model_.changes().apply_faces();
  model_.update().reap();
  if (error && !failed) {
    std::rethrow_exception(error);
  }
  HYDRA_EXPECT(failed || lost.empty(), ModelChanged, lost);
}

std::string ModelWindow::writes_to_hosts() const {
  const bool poisons = model_.changes().poisons();
  if (!poisons && model_.arrivals().timeline().pass() == PassKind::kBackward) {
    return {};  // hooks of inner backwards may write
  }
  const std::string moved = model_.changes().moved();
  if (moved.empty()) {
    return {};
  }
  return "something wrote to " + moved + " while " +
         (poisons ? "Checks(poison_hosts=True) had poisoned the host parameters, and the write is lost"
                  : "the forward ran, which went on with the old values") +
         ". ";
}

void ModelWindow::close() {
  if (model_.gate().swap().exit_all()) {
    close_window(/*failed=*/true);
  }
  model_.gate().swap().clear();
}

// ---- several models ---------------------------------------------------------------------------

void Windows::enter() {
  try {
    for (const auto& model : models_) {
      entered_.emplace_back();
      model->window().enter(entered_.back(), kind_);
    }
  } catch (...) {  // re-raised: all or none are entered
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
      models_[entered_.size()]->window().exit(token, failed || error != nullptr);
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

}  // namespace hydra
