#include "csrc/transfer/lane.h"

#include <string>

#include "csrc/base/errors.h"

namespace hydra {

namespace {

void expect_valid(const Segment& segment, bool known) {
  const bool has_memory = !known || (segment.destination != nullptr && segment.source != nullptr);
  HYDRA_EXPECT(
      segment.bytes == 0 || (segment.bytes > 0 && has_memory), StateError,
      "a segment of " + std::to_string(segment.bytes) + " bytes lacks its source, its destination, or a valid size");
}

}  // namespace

void expect_memory(const Job& job) {
  for (const Segment& segment : job.segments) {
    expect_valid(segment, /*known=*/!job.locate);
  }
}

void prepare_job(Job& job) {
  if (job.before) {
    job.before();
  }
  if (job.locate) {
    job.locate(job.segments);
    for (const Segment& segment : job.segments) {
      expect_valid(segment, /*known=*/true);
    }
  }
}

}  // namespace hydra
