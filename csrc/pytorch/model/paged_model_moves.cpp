// Writes to host parameters, which are writes to all parameters that have the same memory.
#include <algorithm>
#include <iterator>
#include <utility>

#include "csrc/pytorch/model/paged_model.h"
#include "csrc/pytorch/parameters/overlapping_memory.h"

namespace hydra {

void PagedModel::spread_moves() {
  std::vector<HostExtent> written;
  std::vector<HostExtent> overlapping;
  for (const auto& parameter : parameters_) {
    if (parameter->withheld() || !parameter->may_overlap()) {
      continue;
    }
    if (parameter->moved || parameter->version() != parameter->version_seen) {
      written.push_back(parameter->reach());
    }
    overlapping.push_back(parameter->reach());
  }
  // Whether other models have written there is not known.
  const auto others = overlapping_memory::exchange(this, std::move(overlapping));
  written.insert(written.end(), others.begin(), others.end());
  mark_moved(std::move(written));
}

void PagedModel::mark_moved(std::vector<HostExtent> written) {
  if (written.empty()) {
    return;
  }
  const auto before = [](const HostExtent& one, const HostExtent& other) { return one.begin < other.begin; };
  std::sort(written.begin(), written.end(), before);
  std::vector<HostExtent> joined;
  for (const HostExtent& each : written) {
    if (!joined.empty() && each.begin < joined.back().end) {
      joined.back().end = std::max(joined.back().end, each.end);
    } else {
      joined.push_back(each);
    }
  }
  for (const auto& parameter : parameters_) {
    const HostExtent extent = parameter->extent();
    const auto next = std::lower_bound(joined.begin(), joined.end(), HostExtent{extent.end, extent.end}, before);
    if (next != joined.begin() && std::prev(next)->overlaps(extent)) {
      parameter->moved = true;
    }
  }
}

void PagedModel::note_written_home() {
  std::vector<HostExtent> shared;
  for (const auto& parameter : parameters_) {
    if (parameter->page->written) {
      parameter->page->written = false;
      parameter->host.unsafeGetTensorImpl()->bump_version();
      parameter->note_seen();  // the slot holds the same
      if (parameter->may_overlap()) {
        shared.push_back(parameter->reach());
      }
    }
  }
  mark_moved(std::move(shared));
}

}  // namespace hydra
