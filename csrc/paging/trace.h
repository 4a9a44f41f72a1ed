// What a window runs, recorded once and expected again: the order of blocks, and the room activations took.
//
// A trace is a hint. Every pass is recorded anew; when the order differs from the last pass of its kind, the
// position is found again if the block comes later, else the rest of the pass is unknown. Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "csrc/paging/residency.h"

namespace hydra {

class Trace {
 public:
  /// Of weights that have several versions, each with blocks of its own, every version's passes are recorded by
  /// themselves.
  void begin(PassKind kind, int version = 0);
  /// The pass uses `block` from now on. `activation_peak` is what activations took since the last call.
  void arrive(std::int32_t block, Bytes activation_peak);
  /// `completed` is false when the pass ended by an error: then nothing is learned from it.
  void end(Bytes activation_peak, bool completed);

  /// What comes, from the present use on, as far as every block has been met or two further passes have ended.
  /// `limit` is the budget; each moment leaves the room that activations took at that point of the last pass,
  /// and in backward passes `gradient_reserve` more.
  /// Empty when the rest of the pass is unknown. Before the first arrival it starts with the first use.
  std::vector<Use> future(Bytes limit, Bytes gradient_reserve, std::size_t blocks) const;

  /// What the last pass of a kind ran, of the first version: blocks, and the bytes activations took at most while each
  /// was in use.
  std::vector<std::pair<std::int32_t, Bytes>> recorded(PassKind kind) const;
  /// Passes whose order differed from the one recorded before.
  std::int64_t order_changes() const noexcept { return order_changes_; }

 private:
  struct Entry {
    std::int32_t block = 0;
    Bytes activations = 0;
  };
  using Entries = std::vector<Entry>;

  using Pass = std::pair<PassKind, int>;  // its version

  std::map<Pass, Entries> recorded_;
  std::map<Pass, Pass> successor_;
  bool open_ = false;
  bool any_before_ = false;
  Pass pass_{PassKind::kForward, 0};
  Pass previous_{PassKind::kForward, 0};
  Entries current_;
  Bytes prologue_peak_ = 0;
  std::size_t next_ = 0;  // index into the recorded pass of the entry expected next
  bool following_ = false;
  std::int64_t order_changes_ = 0;
};

}  // namespace hydra
