// The windows of one model, and the visits of its sites. A thread's outermost forward or backward opens a window, and
// the last thread inside closes it.
//
// Both edges run under the gate. The opening checks the model, brings slots up to date and swaps the dictionaries; the
// closing swaps them back and brings written bytes and gradients home. A visit pins the blocks of one site, and opens a
// window if its thread is inside none.
// Threads: windows may be entered from any thread, one edge at a time. Calls are made with the interpreter lock, and
// release it while they wait.
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

/// The state of a thread before it entered a window, which exit() restores. The token knows whether the window was
/// entered, so that a caller can make it first and leave in a `finally`, wherever an interrupt arrives.
struct WindowToken {
  bool entered = false;
  std::thread::id thread;
  std::int64_t thread_depth = 0;
  ThreadCharge charge;  // the thread's charge before
  PassKind kind = PassKind::kForward;
  bool inner = false;                 // a backward inside a node of another one, perhaps on a thread of autograd's
  std::weak_ptr<const void> graph{};  // lives as long as the graph of the forward's outputs
  std::optional<std::int64_t> gradients{};  // the count before a backward inside the model's own forward
};

/// One call of a module that uses blocks.
struct SiteVisit {
  WindowToken window;  // entered if the thread was inside none
  BlockList blocks;    // the blocks that this visit has pinned
  Activity::Time begin{};
};

/// The windows of several models for one pass, which are entered and left together.
class Windows {
 public:
  Windows(std::vector<std::shared_ptr<PagedModel>> models, PassKind kind) : models_(std::move(models)), kind_(kind) {}

  /// Enters all windows, or none if it throws.
  void enter();
  /// Leaves all windows that were entered, and then throws the first error.
  void exit(bool failed);

 private:
  std::vector<std::shared_ptr<PagedModel>> models_;
  PassKind kind_;
  std::vector<WindowToken> entered_;
};

class ModelWindow {
 public:
  /// Uses all other parts of the model, which have to outlive this one.
  explicit ModelWindow(PagedModel& model) : model_(model) {}

  /// Enters the window, and opens it if no thread is inside.
  void enter(WindowToken& token, PassKind kind);
  /// Notes the outputs of a forward. Later allocations of the thread (the loss) still belong to this model, until
  /// backward ends or the graph of the outputs is freed.
  void returns(WindowToken& token, const std::vector<at::Tensor>& outputs);
  /// Restores the depth that the thread had at enter(), and closes the window if the last thread leaves. Throws the
  /// first error of the lanes, unless `failed` says that another error is on its way. Does nothing if the token entered
  /// no window.
  void exit(WindowToken& token, bool failed);

  /// Pins the blocks of a module that is called; all of them, or none if it throws. Enters a window if the thread is
  /// inside none.
  void begin_visit(SiteVisit& visit, const BlockList& blocks, PassKind kind);
  /// Notes the outputs of the module.
  void returns(SiteVisit& visit, const std::vector<at::Tensor>& outputs);
  /// Unpins the visit's blocks, and leaves the window that it entered.
  void end_visit(SiteVisit& visit, bool failed);

  /// Closes an open window, as after an error, because the context has ended.
  void close();
  GraphMarks& marks() noexcept { return marks_; }

 private:
  void open_window(PassKind kind);
  void close_window(bool failed);
  void expect_unmoved_hosts() const;
  /// Describes writes to hosts during the forward, which are lost or were not seen; empty if there are none.
  std::string writes_to_hosts() const;
  void restore_charge(WindowToken& token, bool failed) const;

  PagedModel& model_;
  GraphMarks marks_;
};

}  // namespace hydra
