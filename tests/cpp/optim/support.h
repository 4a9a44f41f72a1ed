// Memory for an update, filled with numbers or with random bits.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "csrc/optim/parameter_update.h"

namespace hydra::test {

enum class Content { kNumbers, kAnyBits };

struct Kind {
  std::string name;
  std::variant<AdamStep, SgdStep> step;
  bool momentum;
  WeightLayout layout;
  NumberFormat weights;
  NumberFormat gradient;
  NumberFormat moments;
};

inline std::vector<Kind> all_kinds() {
  using enum NumberFormat;
  const AdamStep adamw = AdamStep::make({1e-2, 0.9, 0.99, 1e-8, 0.1, true}, 3);
  const AdamStep adam = AdamStep::make({1e-2, 0.9, 0.99, 1e-8, 0.1, false}, 3);
  const SgdStep sgd = SgdStep::make({1e-1, 0.9, 0.1, 0.01, false}, false);
  const SgdStep nesterov = SgdStep::make({1e-1, 0.9, 0.0, 0.01, true}, false);
  std::vector<Kind> kinds;
  const auto add = [&](const std::string& name, const std::variant<AdamStep, SgdStep>& step, bool momentum) {
    for (const auto& [layout, weights] : {std::pair{WeightLayout::kFloat32, kFloat32},
                                          {WeightLayout::kMaster, kBfloat16},
                                          {WeightLayout::kMaster, kFloat16},
                                          {WeightLayout::kSplit, kBfloat16}}) {
      for (const NumberFormat gradient : {kFloat32, kBfloat16, kFloat16}) {
        for (const NumberFormat moments : {kFloat32, kBfloat16}) {
          const auto digit = [](auto value) { return std::to_string(static_cast<int>(value)); };
          kinds.push_back({name + digit(layout) + digit(weights) + digit(gradient) + digit(moments), step, momentum,
                           layout, weights, gradient, moments});
        }
      }
    }
  };
  add("adamw", adamw, true);
  add("adam", adam, true);
  add("sgd", sgd, true);
  add("nesterov", nesterov, true);
  add("plain", sgd, false);
  return kinds;
}

/// Every array begins after `offset` elements, so that none is aligned. Those elements and one behind are guards.
class Memory {
 public:
  Memory(const Kind& kind, std::int64_t count, std::int64_t offset, Content content, std::uint32_t seed)
      : kind_(kind), count_(count), offset_(offset) {
    std::mt19937 random(seed);
    fill(weights_, kind.weights, content, random);
    fill(master_, kind.layout == WeightLayout::kSplit ? NumberFormat::kBfloat16 : NumberFormat::kFloat32, content,
         random);
    fill(gradient_, kind.gradient, content, random);
    fill(first_, kind.moments, content, random);
    fill(second_, kind.moments, content, random);
    if (content == Content::kNumbers) {
      make_positive(second_, kind.moments);
    }
  }

  ParameterUpdate update() {
    ParameterUpdate made{.step = kind_.step};
    made.count = count_;
    made.layout = kind_.layout;
    made.weight_format = kind_.weights;
    made.gradient_format = kind_.gradient;
    made.moment_format = kind_.moments;
    made.weights = at(weights_, bytes_of(kind_.weights));
    if (kind_.layout != WeightLayout::kFloat32) {
      made.master = at(master_, kind_.layout == WeightLayout::kSplit ? 2 : 4);
    }
    made.gradient = at(gradient_, bytes_of(kind_.gradient));
    if (kind_.momentum) {
      made.first_moment = at(first_, bytes_of(kind_.moments));
      if (std::holds_alternative<AdamStep>(kind_.step)) {
        made.second_moment = at(second_, bytes_of(kind_.moments));
      }
    }
    made.seed = 12345;
    return made;
  }

  /// Counts the numbers that differ. NaNs are equal, whatever their payloads.
  std::int64_t differences(const Memory& other) const { return weight_differences(other) + state_differences(other); }
  std::int64_t weight_differences(const Memory& other) const { return count(weights_, other.weights_, kind_.weights); }
  std::int64_t state_differences(const Memory& other) const {
    const bool split = kind_.layout == WeightLayout::kSplit;
    const NumberFormat master = split ? NumberFormat::kBfloat16 : NumberFormat::kFloat32;
    return count(master_, other.master_, master) + count(first_, other.first_, kind_.moments) +
           count(second_, other.second_, kind_.moments);
  }

 private:
  using Array = std::vector<std::uint8_t>;

  void* at(Array& array, std::int64_t bytes) { return array.data() + offset_ * bytes; }

  void fill(Array& array, NumberFormat format, Content content, std::mt19937& random) {
    array.resize(static_cast<std::size_t>((offset_ + count_ + 1) * bytes_of(format)));
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < array.size(); i += static_cast<std::size_t>(bytes_of(format))) {
      const std::uint32_t bits = content == Content::kAnyBits ? static_cast<std::uint32_t>(random())
                                                              : std::bit_cast<std::uint32_t>(normal(random));
      const std::uint32_t shown = format == NumberFormat::kFloat16 && content == Content::kNumbers
                                      ? (bits & 0x8000U) | (0x2C00U + (bits & 0xFFFU))
                                      : (format == NumberFormat::kFloat32 ? bits : bits >> 16);
      std::memcpy(array.data() + i, &shown, static_cast<std::size_t>(bytes_of(format)));
    }
  }

  static void make_positive(Array& array, NumberFormat format) {
    for (std::size_t i = static_cast<std::size_t>(bytes_of(format)) - 1; i < array.size();
         i += static_cast<std::size_t>(bytes_of(format))) {
      array[i] = static_cast<std::uint8_t>(array[i] & 0x7FU);
    }
  }

  static std::int64_t count(const Array& mine, const Array& others, NumberFormat format) {
    std::int64_t found = 0;
    const auto bytes = static_cast<std::size_t>(bytes_of(format));
    const std::uint32_t infinity =
        format == NumberFormat::kFloat32 ? 0x7F800000U : (format == NumberFormat::kBfloat16 ? 0x7F80U : 0x7C00U);
    const std::uint32_t magnitude = format == NumberFormat::kFloat32 ? 0x7FFFFFFFU : 0x7FFFU;
    for (std::size_t i = 0; i < mine.size(); i += bytes) {
      std::uint32_t a = 0;
      std::uint32_t b = 0;
      std::memcpy(&a, mine.data() + i, bytes);
      std::memcpy(&b, others.data() + i, bytes);
      const bool nan = (a & magnitude) > infinity && (b & magnitude) > infinity;
      found += a != b && !nan ? 1 : 0;
    }
    return found;
  }

  Kind kind_;
  std::int64_t count_;
  std::int64_t offset_;
  Array weights_, master_, gradient_, first_, second_;
};

}  // namespace hydra::test
