// Records the order of a window's blocks, and the room that activations took, and expects the same of the next window.
//
// A trace is a hint. Every pass is recorded anew; of what activations took, the most of the last 16 to 32 passes of one
// order counts, since microbatches differ. A pass may leave the order of the last one of its kind. If the block
// comes later in that order, the trace continues there; otherwise the rest of the pass is unknown. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "csrc/paging/residency.h"

namespace hydra {

class Trace {
 public:
  /// Weights may have several versions, each with blocks of its own; the passes of each version are recorded
  /// separately.
  void begin(PassKind kind, int version = 0);
  /// The pass uses `block` from now on. `activation_peak`: the most that activations took since the last call.
  void arrive(std::int32_t block, Bytes activation_peak);
  /// `completed`: false if the pass ended with an error; then its record is dropped.
  void end(Bytes activation_peak, bool completed);

  /// The expected uses, from the present one on: the rest of this pass, and up to two further passes. A further pass is
  /// added only while there are fewer than four uses for each of `blocks`. Before the first arrival the uses start with
  /// the first. They are empty if the rest of the pass is unknown.
  /// `limit`: the budget. The room of each use is the limit less the most bytes that activations took at that point of
  /// the last passes, and less `gradient_reserve` in backward passes.
  std::vector<Use> future(Bytes limit, Bytes gradient_reserve, std::size_t blocks) const;

  /// From the next pass of each kind on, what activations took in earlier ones does not count: they are treated in
  /// another way from now on. Until it has ended, the earlier figures are the best there are.
  void forget_activations();

  /// The blocks of the last pass of a kind, for the first version, each with the most bytes that activations took while
  /// it was in use.
  std::vector<std::pair<std::int32_t, Bytes>> recorded(PassKind kind) const;
  /// Passes whose order differed from the one recorded before.
  std::int64_t order_changes() const noexcept { return order_changes_; }

 private:
  static constexpr int kWindow = 16;  // passes

  struct Entry {
    Bytes activations() const { return std::max(lately, before); }

    std::int32_t block = 0;
    Bytes lately = 0;  // the most in this window of passes
    Bytes before = 0;  // in the last one
  };
  using Entries = std::vector<Entry>;
  struct Record {
    Entries entries{};
    int left = kWindow;  // passes in this window
  };

  using Pass = std::pair<PassKind, int>;  // kind and version

  std::map<Pass, Record> recorded_;
  std::map<Pass, Pass> successor_;
  bool open_ = false;
  bool any_before_ = false;
  Pass pass_{PassKind::kForward, 0};
  Pass previous_{PassKind::kForward, 0};
  Entries current_;
  Bytes prologue_peak_ = 0;
  std::size_t next_ = 0;  // index of the expected entry in the recorded pass
  bool following_ = false;
  std::int64_t order_changes_ = 0;
};

}  // namespace hydra
