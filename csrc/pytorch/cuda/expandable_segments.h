// Expandable segments of torch's allocator, which are on while an object of this kind lives.
//
// A fixed segment of which one piece is in use serves nothing larger than its free pieces. Saved tensors and slots of
// many sizes leave most of a tight budget in such pieces. From expandable segments torch takes the free pages, and any
// allocation gets them. A page has 20 MiB, so small budgets are better off without: nothing is done for them. Nor is
// anything done if the user's settings name expandable segments, on or off, or if a device of the process cannot map
// memory by pages.
//
// The settings are the process's. All others stay, and the last object restores them unless they were changed
// meanwhile. Thread-safe, but torch reads some settings without a lock: no other thread may allocate meanwhile.
#pragma once

#include "csrc/base/types.h"

namespace hydra {

class ExpandableSegments {
 public:
  static constexpr Bytes kPage = 20 * kMiB;

  explicit ExpandableSegments(Bytes budget);
  ~ExpandableSegments();
  ExpandableSegments(const ExpandableSegments&) = delete;
  ExpandableSegments& operator=(const ExpandableSegments&) = delete;

  /// Bytes by which torch may pass a large limit on what it reserves, since it maps whole pages. 0 for small ones, of
  /// which a page would be much: for them expandable segments are only on if the user has chosen so.
  static Bytes excess(Bytes limit);

 private:
  const bool counts_;
};

}  // namespace hydra
