// A plan that stands: all blocks of the future are in slots, and there is room for all of them at every moment.
//
// Most steps of a model that fits are such a future. An arrival that was foreseen then changes nothing but the rank of
// the block before it, and planning anew would find the same. So the plan goes on until a block has lost its slot, the
// pass leaves its order, or memory has changed.
//
// A part of Passes. Not thread-safe: the table's mutex guards it. Sizes are bytes.
#pragma once

#include <optional>
#include <vector>

#include "csrc/paging/block_table.h"
#include "csrc/paging/residency.h"

namespace hydra {

/// The memory that a plan divides.
struct PlannedMemory {
  /// Reads the settled blocks. `limit`: all memory.
  static PlannedMemory of(const BlockTable& table, Bytes limit) noexcept;
  bool operator==(const PlannedMemory&) const = default;

  Bytes limit = 0;
  Bytes settled = 0;  // in slots of settled blocks, which keep them under any plan
  Bytes beside = 0;   // beside those slots
};

class StandingPlan {
 public:
  /// Takes the future over if it is such a one: blocks in it are marked as wanted, and their next uses are its indices.
  /// `future[0]` is the use now, or with `is_ahead` the first one to come.
  void set(const BlockTable& table, const PlannedMemory& memory, std::vector<Use> future, bool is_ahead);
  void drop() noexcept { future_.clear(); }
  /// If the plan stands and `block` is its next use, ranks the block before it by its next use, and returns the room of
  /// the present use. Otherwise the plan falls.
  std::optional<Bytes> go_on(const BlockTable& table, const PlannedMemory& memory, std::int32_t block);

 private:
  bool stands(const BlockTable& table) const noexcept;

  std::vector<Use> future_;  // empty if no plan stands
  std::size_t next_ = 0;     // index of the next use
  PlannedMemory memory_;
};

}  // namespace hydra
