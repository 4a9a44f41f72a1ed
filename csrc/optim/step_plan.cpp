#include "csrc/optim/step_plan.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include "csrc/base/errors.h"
#include "csrc/base/host_work.h"

namespace hydra {

namespace {

void expect_complete(const ParameterUpdate& update) {
  const bool adam = std::holds_alternative<AdamStep>(update.step);
  const bool masterless = update.layout == WeightLayout::kFloat32;
  HYDRA_EXPECT(update.count == 0 || (update.weights != nullptr && update.gradient != nullptr), StateError,
               "the update has no weights or no gradient");
  HYDRA_EXPECT(update.count == 0 || update.new_weights == nullptr || update.new_weights != update.weights, StateError,
               "the update's new weights are its old weights: pass null to write in place");
  HYDRA_EXPECT(
      masterless == (update.weight_format == NumberFormat::kFloat32), StateError,
      "the update's layout does not match its weights: fp32 weights have no master, bf16 and fp16 weights have");
  HYDRA_EXPECT(update.layout != WeightLayout::kSplit || update.weight_format == NumberFormat::kBfloat16, StateError,
               "the update has a split master, and its weights are not bf16");
  HYDRA_EXPECT(update.count == 0 || masterless == (update.master == nullptr), StateError,
               "the update lacks its master, or has one that its layout does not use");
  HYDRA_EXPECT(update.moment_format != NumberFormat::kFloat16, StateError,
               "the update has fp16 moments: moments are fp32 or bf16");
  HYDRA_EXPECT(update.count == 0 || (adam ? update.first_moment != nullptr && update.second_moment != nullptr
                                          : update.second_moment == nullptr),
               StateError, "the update lacks a moment, or has one that its rule does not use");
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
  if (host_work_taken(traffic_bytes())) {
    return;
  }
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
               "the plan has no parameter " + std::to_string(parameter) + ", only " + std::to_string(updates_.size()) +
                   " parameters");
  const ParameterUpdate& update = updates_[parameter];
  HYDRA_EXPECT(0 <= begin && begin <= end && end <= update.count, StateError,
               "the range " + std::to_string(begin) + " to " + std::to_string(end) +
                   " is outside of a parameter with " + std::to_string(update.count) + " elements");
  run_update(update, begin, end, scale, instructions_);
}

}  // namespace hydra
