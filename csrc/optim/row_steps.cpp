#include "csrc/optim/row_steps.h"

#include <algorithm>
#include <cstring>

#include "csrc/base/errors.h"

namespace hydra {

namespace {

constexpr std::int64_t kElementsAtOnce = 1 << 12;  // of one task

void* shifted(void* array, std::int64_t elements) {
  return array == nullptr ? nullptr : static_cast<float*>(array) + elements;
}

/// The update of one row.
ParameterUpdate update_of(const Rows& rows, std::int64_t row) {
  ParameterUpdate update = rows.whole;
  const std::int64_t begin = row * rows.width;
  update.count = rows.width;
  update.weights = shifted(update.weights, begin);
  update.first_moment = shifted(update.first_moment, begin);
  update.second_moment = shifted(update.second_moment, begin);
  return update;
}

bool is_zero(const void* moment, std::int64_t count) {
  const auto* bits = static_cast<const std::uint32_t*>(moment);
  return moment == nullptr || std::all_of(bits, bits + count, [](std::uint32_t each) { return each == 0; });
}

template <class One>
void each_row(const Rows& rows, ThreadPool& pool, const One& one) {
  const auto count = static_cast<std::int64_t>(rows.numbers.size());
  const std::int64_t share = std::max<std::int64_t>(1, kElementsAtOnce / std::max<std::int64_t>(1, rows.width));
  pool.parallel_for((count + share - 1) / share, [&](std::int64_t task) {
    for (std::int64_t i = task * share; i < std::min(count, (task + 1) * share); ++i) {
      one(i, rows.numbers[static_cast<std::size_t>(i)]);
    }
  });
}

void expect_rows(const Rows& rows) {
  const ParameterUpdate& whole = rows.whole;
  const auto is_plain = [](NumberFormat format) { return format == NumberFormat::kFloat32; };
  HYDRA_EXPECT(whole.layout == WeightLayout::kFloat32 && is_plain(whole.weight_format) &&
                   is_plain(whole.gradient_format) && is_plain(whole.moment_format),
               StateError, "rows are stepped in float32 alone");
  const auto height = static_cast<std::int64_t>(rows.made.size());
  HYDRA_EXPECT(height * rows.width == whole.count, StateError, "the rows are not those of the parameter");
  const bool known = std::all_of(rows.numbers.begin(), rows.numbers.end(),
                                 [height](std::int64_t row) { return 0 <= row && row < height; });
  HYDRA_EXPECT(known, StateError, "a gradient has a row that its parameter lacks");
}

}  // namespace

void catch_up(const Rows& rows, std::int64_t first, std::span<const MissedStep> missed, ThreadPool& pool) {
  expect_rows(rows);
  std::size_t resting = missed.size();  // from here on all steps rest
  while (resting > 0 && missed[resting - 1].rests) {
    --resting;
  }
  const std::vector<float> zeros(static_cast<std::size_t>(rows.width));
  each_row(rows, pool, [&](std::int64_t, std::int64_t row) {
    std::int32_t& made = rows.made[static_cast<std::size_t>(row)];
    ParameterUpdate update = update_of(rows, row);
    update.gradient = zeros.data();
    const auto begin = static_cast<std::size_t>(made - first);
    for (std::size_t next = begin; next < missed.size(); ++next) {
      if (next == std::max(begin, resting) && is_zero(update.first_moment, rows.width) &&
          is_zero(update.second_moment, rows.width)) {
        break;
      }
      update.step = missed[next].step;
      run_update(update, 0, rows.width, 1.0F);
    }
    made = static_cast<std::int32_t>(first + static_cast<std::int64_t>(missed.size()));
  });
}

void step_rows(const Rows& rows, const std::variant<AdamStep, SgdStep>& step, const float* gradient, std::int32_t made,
               ThreadPool& pool) {
  expect_rows(rows);
  each_row(rows, pool, [&](std::int64_t i, std::int64_t row) {
    ParameterUpdate update = update_of(rows, row);
    update.step = step;
    update.gradient = gradient + i * rows.width;
    run_update(update, 0, rows.width, 1.0F);
    rows.made[static_cast<std::size_t>(row)] = made;
  });
}

}  // namespace hydra
