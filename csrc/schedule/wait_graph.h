// Which rank waits for which, and the one way to run through actions that every rank takes in its own order.
//
// A forward waits for the one of the stage before, or for the send that brings its output; a backward likewise for the
// next stage's. The end of an update waits for the reductions of its batch on every stage, as a norm over the whole
// model makes it; its begin waits for nothing. Sends and receives return at once; with `rendezvous` a send waits until
// its receive is there.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "csrc/schedule/batch_index.h"
#include "csrc/schedule/schedule.h"

namespace hydra::schedule {

class WaitGraph {
 public:
  /// `ranks` are actions with batches from 0 on, each at most once, communication included; both have to outlive it.
  WaitGraph(const Schedule& schedule, const std::vector<Actions>& ranks, const BatchIndex& batches);

  /// Calls `run(rank, position)` for each action when all it waits for were run. Returns how far each rank came:
  /// everywhere to its end, or the ranks block each other.
  std::vector<std::size_t> run(bool rendezvous, const std::function<void(int, std::size_t)>& run) const;

  /// What blocked ranks wait for.
  std::string blocked(const std::vector<std::size_t>& reached) const;

  /// The action that the one at `position` waits for, counted over all ranks' actions in turn; kNothing if none.
  static constexpr std::size_t kNothing = static_cast<std::size_t>(-1);
  std::size_t awaited(int rank, std::size_t position) const { return awaited_[id(rank, position)]; }
  std::size_t id(int rank, std::size_t position) const { return firsts_[index(rank)] + position; }
  std::size_t actions() const noexcept { return awaited_.size(); }

 private:
  void wait_for_values(const std::vector<std::vector<std::size_t>>& places, std::size_t own, const Action& action);
  bool ready(std::size_t own, const Action& action, bool rendezvous, const std::vector<bool>& done,
             const std::vector<int>& reductions_left) const;

  const Schedule& schedule_;
  const std::vector<Actions>& ranks_;
  const BatchIndex& batches_;
  std::vector<std::size_t> firsts_;     // of each rank
  std::vector<std::size_t> awaited_;    // of each action
  std::vector<std::size_t> receivers_;  // of each send
};

}  // namespace hydra::schedule
