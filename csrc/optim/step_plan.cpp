#include "csrc/optim/step_plan.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include "csrc/base/errors.h"

namespace hydra {

namespace {

void expect_complete(const ParameterUpdate& update) {
  const bool adam = std::holds_alternative<AdamStep>(update.step);
  const bool masterless = update.layout == WeightLayout::kFloat32;
  HYDRA_EXPECT(update.count == 0 || (update.weights != nullptr && update.gradient != nullptr), StateError,
               "an update without weights or gradient");
  HYDRA_EXPECT(update.count == 0 || update.new_weights == nullptr || update.new_weights != update.weights, StateError,
               "an update whose new weights are the old ones");
  HYDRA_EXPECT(masterless == (update.weight_format == NumberFormat::kFloat32), StateError,
               "an update whose weights and master do not go together: fp32 has no master, bf16 and fp16 have one");
  HYDRA_EXPECT(update.layout != WeightLayout::kSplit || update.weight_format == NumberFormat::kBfloat16, StateError,
               "an update with a split master of weights that are not bf16");
  HYDRA_EXPECT(update.count == 0 || masterless == (update.master == nullptr), StateError,
               "an update with a master too many or too few");
  HYDRA_EXPECT(update.moment_format != NumberFormat::kFloat16, StateError, "an update with fp16 moments");
  HYDRA_EXPECT(update.count == 0 || (adam ? update.first_moment != nullptr && update.second_moment != nullptr
                                          : update.second_moment == nullptr),
               StateError, "an update with a moment too many or too few");
}

}  // namespace

void StepPlan::add(const ParameterUpdate& update) {
  expect_complete(update);
  updates_.push_back(update);
  ranges_.add(update.count);
}

std::int64_t StepPlan::traffic_bytes() const noexcept {
  std::int64_t sum = 0;
  for (const ParameterUpdate& update : updates_) {
    sum += hydra::traffic_bytes(update);
  }
  return sum;
}

bool StepPlan::overlaps() const {
  std::vector<std::pair<const std::byte*, const std::byte*>> written;
  for (const ParameterUpdate& update : updates_) {
    const void* const weights = update.new_weights != nullptr ? update.new_weights : update.weights;
    const auto* const begin = static_cast<const std::byte*>(weights);
    if (update.count > 0) {
      written.emplace_back(begin, begin + update.count * bytes_of(update.weight_format));
    }
  }
  std::sort(written.begin(), written.end());
  const auto both = [](const auto& first, const auto& second) { return second.first < first.second; };
  return std::adjacent_find(written.begin(), written.end(), both) != written.end();
}

void StepPlan::run(ThreadPool& pool, float scale) const {
  const auto run_one = [this, scale](const Range& range) {
    run_update(updates_[range.item], range.begin, range.end, scale, instructions_);
  };
  if (!overlaps()) {
    pool.parallel_for(ranges_.size(), [&](std::int64_t index) { run_one(ranges_[index]); });
    return;
  }
  for (std::int64_t index = 0; index < ranges_.size(); ++index) {
    run_one(ranges_[index]);
  }
}

void StepPlan::run_range(std::size_t parameter, std::int64_t begin, std::int64_t end, float scale) const {
  HYDRA_EXPECT(parameter < updates_.size(), StateError,
               "parameter " + std::to_string(parameter) + " of a plan of " + std::to_string(updates_.size()));
  const ParameterUpdate& update = updates_[parameter];
  HYDRA_EXPECT(0 <= begin && begin <= end && end <= update.count, StateError,
               "elements " + std::to_string(begin) + " to " + std::to_string(end) + " of a parameter of " +
                   std::to_string(update.count));
  run_update(update, begin, end, scale, instructions_);
}

}  // namespace hydra
