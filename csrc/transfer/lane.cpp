#include "csrc/transfer/lane.h"

#include <string>

#include "csrc/base/errors.h"

namespace hydra {

void expect_memory(const Job& job) {
  for (const Segment& segment : job.segments) {
    const bool has_memory = segment.destination != nullptr && segment.source != nullptr;
    HYDRA_EXPECT(
        segment.bytes == 0 || (segment.bytes > 0 && has_memory), StateError,
        "a segment of " + std::to_string(segment.bytes) + " bytes lacks its source, its destination or a valid size");
  }
}

}  // namespace hydra
