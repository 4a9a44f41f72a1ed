// What each action waits for, and a run through the actions of all ranks, each of which follows its own order.
//
// A forward waits for that of the previous stage, or for the send that brings its output; a backward waits for the next
// stage's in the same way. The end of an update waits for the reductions of its batch on every stage, because a norm
// over the whole model would; its begin waits for nothing. Sends and receives return at once; with `rendezvous` a send
// waits until its receive is posted.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "csrc/schedule/batch_index.h"
#include "csrc/schedule/schedule.h"

namespace hydra::schedule {

class WaitGraph {
 public:
  /// `ranks`: the actions of each rank, communication included, with batches from 0 on, each action at most once.
  /// `schedule`, `ranks` and `batches` have to outlive this object.
  WaitGraph(const Schedule& schedule, const std::vector<Actions>& ranks, const BatchIndex& batches);

  /// Calls `run(rank, position)` for each action once everything it waits for has run. Returns how many actions of each
  /// rank ran: unless all did, the ranks block each other.
  std::vector<std::size_t> run(bool rendezvous, const std::function<void(int, std::size_t)>& run) const;

  /// Describes, for a message, what each blocked rank waits for.
  std::string blocked(const std::vector<std::size_t>& reached) const;

  /// The id of the action that the one at `position` waits for, or kNothing. Ids count through all ranks' actions.
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
  std::vector<std::size_t> firsts_;     // by rank: the id of its first action
  std::vector<std::size_t> awaited_;    // by action
  std::vector<std::size_t> receivers_;  // by action: the receive of a send
};

}  // namespace hydra::schedule
