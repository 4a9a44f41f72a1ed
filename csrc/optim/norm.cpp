#include "csrc/optim/norm.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "csrc/base/float_mode.h"
#include "csrc/base/host_work.h"
#include "csrc/optim/kernels/kernels.h"
#include "csrc/optim/ranges.h"

namespace hydra {

double chunk_sum_of_squares(const void* data, NumberFormat format, std::int64_t count,
                            InstructionSet instructions) noexcept {
  const StandardFloatMode standard;
  alignas(64) std::array<double, kNormLanes> lanes{};
  kernels(instructions).add_squares(data, format, count, lanes.data());
  for (std::size_t half = kNormLanes / 2; half > 0; half /= 2) {
    for (std::size_t lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return lanes[0];
}

void sums_of_squares(std::span<const NormInput> inputs, std::span<double> sums, ThreadPool& pool,
                     InstructionSet instructions) {
  Ranges ranges(kNormChunk);
  Bytes bytes = 0;
  for (const NormInput& input : inputs) {
    ranges.add(input.count);
    bytes += input.count * bytes_of(input.format);
  }
  if (host_work_taken(bytes)) {
    std::ranges::fill(sums, 0.0);
    return;
  }
  std::vector<double> parts(static_cast<std::size_t>(ranges.size()));
  pool.parallel_for(ranges.size(), [&](std::int64_t index) {
    const Range range = ranges[index];
    const NormInput& input = inputs[range.item];
    const auto* data = static_cast<const char*>(input.data) + range.begin * bytes_of(input.format);
    parts[static_cast<std::size_t>(index)] =
        chunk_sum_of_squares(data, input.format, range.end - range.begin, instructions);
  });
  std::int64_t next = 0;
  for (std::size_t item = 0; item < inputs.size(); ++item) {
    sums[item] = 0.0;
    for (const std::int64_t end = ranges.end_of(item); next < end; ++next) {
      sums[item] += parts[static_cast<std::size_t>(next)];
    }
  }
}

double norm_of_sums(std::span<const double> sums) noexcept {
  double total = 0.0;
  for (const double sum : sums) {
    total += sum;
  }
  return std::sqrt(total);
}

float clip_factor(double norm, double max_norm) noexcept {
  const double factor = max_norm / (norm + 1e-6);
  return static_cast<float>(factor > 1.0 ? 1.0 : factor);
}

}  // namespace hydra
