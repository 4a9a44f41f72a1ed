// Codes of a pool's indices: they restore the indices exactly, for every geometry.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "csrc/codec/window_codes.h"

namespace hydra::codec {
namespace {

using Random = std::mt19937_64;

std::int64_t among(Random& random, std::int64_t least, std::int64_t most) {
  return std::uniform_int_distribution<std::int64_t>(least, most)(random);
}

PoolGeometry any_geometry(Random& random) {
  PoolGeometry made;
  for (std::size_t side = 0; side < 2; ++side) {
    made.kernel[side] = among(random, 1, 6);
    made.stride[side] = among(random, 1, 4);
    made.dilation[side] = among(random, 1, 3);
    made.padding[side] = among(random, 0, made.kernel[side] / 2);
    made.outputs[side] = among(random, 1, 9);
  }
  made.input_width = among(random, 1, 40);
  made.planes = among(random, 0, 5);
  made.inner = among(random, 1, 3);
  return made;
}

/// Returns an index in each output's window, by the definition of a pool.
std::vector<std::int64_t> any_indices(const PoolGeometry& pool, Random& random) {
  std::vector<std::int64_t> indices;
  for (std::int64_t plane = 0; plane < pool.planes; ++plane) {
    for (std::int64_t y = 0; y < pool.outputs[0]; ++y) {
      for (std::int64_t x = 0; x < pool.outputs[1]; ++x) {
        for (std::int64_t channel = 0; channel < pool.inner; ++channel) {
          const std::int64_t row =
              y * pool.stride[0] - pool.padding[0] + among(random, 0, pool.kernel[0] - 1) * pool.dilation[0];
          const std::int64_t column =
              x * pool.stride[1] - pool.padding[1] + among(random, 0, pool.kernel[1] - 1) * pool.dilation[1];
          indices.push_back(row * pool.input_width + column);
        }
      }
    }
  }
  return indices;
}

TEST(WindowCodes, IndicesComeBack) {
  Random random(1);
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 400; ++round) {
      const PoolGeometry geometry = any_geometry(random);
      const std::vector<std::int64_t> indices = any_indices(geometry, random);
      ASSERT_EQ(static_cast<std::int64_t>(indices.size()), geometry.count());
      std::vector<std::uint8_t> stream(static_cast<std::size_t>(geometry.stream_bytes()));
      ASSERT_TRUE(encode_windows(geometry, indices.data(), stream.data(), pool));
      std::vector<std::int64_t> back(indices.size());
      decode_windows(geometry, stream.data(), back.data(), pool);
      ASSERT_EQ(back, indices);
    }
  }
}

TEST(WindowCodes, TakeAsManyBitsAsTheWindowNeeds) {
  const auto bits_of = [](std::int64_t rows, std::int64_t columns) {
    PoolGeometry made;
    made.kernel = {rows, columns};
    return made.bits();
  };
  EXPECT_EQ(bits_of(1, 2), 1);
  EXPECT_EQ(bits_of(2, 2), 2);
  EXPECT_EQ(bits_of(3, 3), 4);
  EXPECT_EQ(bits_of(16, 16), 8);
  EXPECT_EQ(bits_of(16, 17), 0);
  PoolGeometry made;
  made.kernel = made.stride = {2, 2};
  made.outputs = {4, 8};
  made.planes = 3;
  EXPECT_EQ(made.stream_bytes(), 3 * 4 * 2);
}

TEST(WindowCodes, AnIndexOutsideItsWindowIsNoticed) {
  PoolGeometry geometry;
  geometry.kernel = geometry.stride = {2, 2};
  geometry.dilation = {1, 1};
  geometry.input_width = 16;
  geometry.outputs = {4, 8};
  geometry.planes = 2;
  Random random(2);
  ThreadPool pool(2);
  std::vector<std::int64_t> indices = any_indices(geometry, random);
  std::vector<std::uint8_t> stream(static_cast<std::size_t>(geometry.stream_bytes()));
  for (const std::size_t place : {std::size_t{0}, indices.size() / 2, indices.size() - 1}) {
    const std::int64_t before = indices[place];
    for (const std::int64_t away : {-64, -2, 2, 64}) {
      indices[place] = before + away;
      EXPECT_FALSE(encode_windows(geometry, indices.data(), stream.data(), pool));
    }
    indices[place] = before;
  }
  EXPECT_TRUE(encode_windows(geometry, indices.data(), stream.data(), pool));
}

}  // namespace
}  // namespace hydra::codec
