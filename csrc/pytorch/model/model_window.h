// The windows of one model, and the visits of its sites: what one thread's outermost forward or backward opens, and the
// last thread inside closes.
//
// At those edges, under the gate, everything is checked, brought up to date and swapped, and brought home again. A
// visit pins the blocks of one site; it opens a window of its own if its thread is inside none. Threads: windows may be
// entered from any thread, one edge at a time. Calls are made with the interpreter lock, and release it while they
// wait.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "csrc/base/activity.h"
#include "csrc/pytorch/memory/counting_allocator.h"
#include "csrc/pytorch/model/graph_marks.h"
#include "csrc/pytorch/parameters/model_blocks.h"

namespace hydra {

/// What a thread takes into a window and gives back on leaving it. It knows whether the window was entered, so
/// that the caller can make it first and leave in a `finally`, wherever an interrupt arrives.
struct WindowToken {
  bool entered = false;
  std::thread::id thread;
  std::int64_t thread_depth = 0;
  ThreadCharge charge;  // the thread's before
  PassKind kind = PassKind::kForward;
  std::weak_ptr<const void> graph{};        // of what a forward returned
  std::optional<std::int64_t> gradients{};  // before a backward inside the model's own forward
};

/// One call of a module that uses blocks; a window of its own if its thread is inside none.
struct SiteVisit {
  WindowToken window;
  BlockList blocks;  // those pinned
  Activity::Time begin{};
};

/// The windows of several models, of one pass: entered and left together.
class Windows {
 public:
  Windows(std::vector<std::shared_ptr<PagedModel>> models, PassKind kind) : models_(std::move(models)), kind_(kind) {}

  /// All or none.
  void enter();
  /// Leaves those entered, all of them; throws the first error.
  void exit(bool failed);

 private:
  std::vector<std::shared_ptr<PagedModel>> models_;
  PassKind kind_;
  std::vector<WindowToken> entered_;
};

class ModelWindow {
 public:
  /// Its edges need all other parts of the model, which have to outlive it.
  explicit ModelWindow(PagedModel& model) : model_(model) {}

  /// Opens the window if no thread is inside.
  void enter(WindowToken& token, PassKind kind);
  /// A forward returns these. What its thread allocates afterwards still belongs to this model (the loss), until
  /// backward ends or nothing is left of their graph.
  void returns(WindowToken& token, const std::vector<at::Tensor>& outputs);
  /// Restores the depth the thread had at enter(); closes the window when the last thread leaves. Throws what went
  /// wrong on the lanes, unless `failed` says that another error is on its way. Does nothing with a token that entered
  /// no window.
  void exit(WindowToken& token, bool failed);

  /// A module that uses these blocks is called, returns. All blocks or none.
  void begin_visit(SiteVisit& visit, const BlockList& blocks, PassKind kind);
  void returns(SiteVisit& visit, const std::vector<at::Tensor>& outputs);
  void end_visit(SiteVisit& visit, bool failed);

  /// The context has ended: closes an open window, as after an error.
  void close();
  GraphMarks& marks() noexcept { return marks_; }

 private:
  void open_window(PassKind kind);
  void close_window(bool failed);
  void expect_unmoved_hosts() const;
  /// What the forward wrote to hosts, in words: it is lost, or was not seen.
  std::string writes_to_hosts() const;
  void restore_charge(WindowToken& token, bool failed) const;

  PagedModel& model_;
  GraphMarks marks_;
};

}  // namespace hydra
