// The CUDA sources, translated and run on the emulated device, give the bytes of the host's codec, optimizer and
// digests.
//
// Arrays lie in the host's memory, each as long as it has to be: there AddressSanitizer sees an access beside them.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "csrc/base/errors.h"
#include "emulator/kernels/executor.h"
#include "tests/cpp/codec/contents.h"
#include "tests/cpp/codec/support.h"
#include "tests/cpp/emulator/runtime_support.h"
#include "tests/cpp/optim/support.h"
#include "translated/cuda_codec.cpp"
#include "translated/cuda_place_sum.cpp"
#include "translated/cuda_step.cpp"
#include "translated/cuda_window_codes.cpp"

namespace {

namespace kernels = emulated_cuda::kernels;

#if defined(__SANITIZE_THREAD__)
constexpr bool kFewCases = true;  // each thread of a block is one of the system
#else
constexpr bool kFewCases = false;
#endif

using emulated_cuda::test::OwnMemory;  // for a word that cudaMemsetAsync sets
using emulated_cuda::test::OwnStream;

/// Expects that the launch, and all work on the stream so far, succeeds.
void expect_done(cudaStream_t on, cudaError_t launched) {
  ASSERT_EQ(launched, cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(on), cudaSuccess) << kernels::last_error();
}

std::uint32_t* word(const OwnMemory& memory) { return reinterpret_cast<std::uint32_t*>(memory.get()); }

std::uint32_t value(const OwnMemory& memory, cudaStream_t on) {
  std::uint32_t value = 0;
  std::memcpy(&value, emulated_cuda::test::contents(memory.get(), on, sizeof value).data(), sizeof value);
  return value;
}

}  // namespace

namespace hydra::codec {
namespace {

using test::Memory;

std::vector<std::uint32_t> workspace(std::int64_t count) {
  return std::vector<std::uint32_t>(static_cast<std::size_t>(workspace_bytes(count)) / sizeof(std::uint32_t));
}

Memory compressed(cudaStream_t on, const Quantizer& quantizer, Choice choice, const Memory& numbers) {
  const std::int64_t count = static_cast<std::int64_t>(numbers.size()) / hydra::bytes_of(quantizer.format);
  Memory stream(static_cast<std::size_t>(most_bytes(quantizer.format, count)), 0xAB);
  std::vector<std::uint32_t> room = workspace(count);
  expect_done(on, launch_compress(quantizer, choice, numbers.data(), count, stream.data(), room.data(), on));
  StreamHeader header;
  std::memcpy(&header, stream.data(), sizeof header);
  const auto bytes = static_cast<std::size_t>(stream_bytes(header));
  EXPECT_LE(bytes, stream.size());
  stream.resize(std::min(bytes, stream.size()));
  return stream;
}

/// Returns no numbers if the bytes are damaged, or cut off.
Memory restored(cudaStream_t on, const StreamHeader& header, const Memory& stream) {
  const Memory exact = stream;  // without a vector's spare room
  Memory numbers(static_cast<std::size_t>(header.count * hydra::bytes_of(header.format)), 0xCD);
  std::vector<std::uint32_t> room = workspace(header.count);
  const OwnMemory damaged;
  expect_done(on, launch_decompress(header, exact.data(), static_cast<Bytes>(exact.size()), numbers.data(), room.data(),
                                    word(damaged), on));
  const std::uint32_t found = value(damaged, on);
  EXPECT_LE(found, 1);
  return found == 0 ? numbers : Memory{};
}

Memory restored(cudaStream_t on, const Memory& stream) { return restored(on, header_of(stream), stream); }

void expect_equal_to_host(cudaStream_t on, const Quantizer& quantizer, Choice choice, const Memory& numbers) {
  const Memory stream = test::compressed(quantizer, choice, numbers, InstructionSet::kPortable);
  ASSERT_EQ(compressed(on, quantizer, choice, numbers), stream) << quantizer.bound;
  ASSERT_EQ(restored(on, stream), test::restored(stream, InstructionSet::kPortable)) << quantizer.bound;
}

TEST(CodecKernels, WriteAndReadTheStreamsOfTheHost) {
  const OwnStream on;
  std::vector<std::vector<float>> contents = test::contents(kFewCases ? 70 : 32 * 34 + 13);
  std::vector<float> bounds = {0.0F, 1e-3F, 0.01F, 0.3F, 2.0F};
  if (kFewCases) {
    contents.erase(contents.begin(), contents.end() - 2);
    bounds = {0.01F};
  }
  for (const NumberFormat format : test::kFormats) {
    for (const bool keep_signs : {false, true}) {
      for (const float bound : bounds) {
        const Quantizer quantizer = Quantizer::make(format, static_cast<double>(bound), keep_signs);
        for (const std::vector<float>& values : contents) {
          for (const Choice choice : test::kChoices) {
            if (!kFewCases || (choice == Choice::kSigned) == keep_signs) {
              expect_equal_to_host(on, quantizer, choice, test::memory_of(format, values));
            }
          }
        }
      }
    }
  }
}

TEST(CodecKernels, TakeAnyCount) {
  const OwnStream on;
  const std::vector<float> values = test::contents(2 * 32768 + 200)[5];
  std::vector<int> counts = {0, 1, 1025};
  if (!kFewCases) {
    counts.insert(counts.end(), {31, 32, 33, 1023, 1024, 8191, 8192, 8193, 32767, 32768, 32769, 65536, 65537});
  }
  for (const NumberFormat format : {NumberFormat::kFloat32, NumberFormat::kFloat16}) {
    const Quantizer quantizer = Quantizer::make(format, 2e-5, false);
    for (const int count : counts) {
      expect_equal_to_host(on, quantizer, Choice::kShortest,
                           test::memory_of(format, {values.begin(), values.begin() + count}));
    }
  }
}

TEST(CodecKernels, GiveTheSameInEveryOrderOfThreads) {
  if (kFewCases) {
    return;
  }
  const OwnStream on;
  const std::vector<std::vector<float>> contents = test::contents(2500);
  const Quantizer quantizer = Quantizer::make(NumberFormat::kFloat32, 0.02, false);
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    kernels::set_seed(seed);
    const std::vector<float>& values = contents[seed % contents.size()];
    expect_equal_to_host(on, quantizer, Choice::kShortest, test::memory_of(NumberFormat::kFloat32, values));
  }
}

/// More chunks than a block of find_kernel has threads. The numbers are stored raw, which is quick.
TEST(CodecKernels, FindTheGroupsOfManyChunks) {
  if (kFewCases) {
    return;
  }
  const OwnStream on;
  const std::vector<float> values = test::contents(35 * 32768 + 700)[0];
  expect_equal_to_host(on, Quantizer::make(NumberFormat::kBfloat16, 0.0, false), Choice::kSigned,
                       test::memory_of(NumberFormat::kBfloat16, values));
}

/// Of more chunks than its block has threads, without the numbers that so many chunks would have.
void expect_finished(cudaStream_t on, std::int64_t chunks, std::int64_t missing_blocks, std::uint32_t seed) {
  const Layout layout((chunks * kChunkBlocks - missing_blocks) * kBlockNumbers);
  ASSERT_EQ(layout.chunks, chunks);
  std::mt19937 random(seed);
  std::vector<std::uint32_t> group_bytes(static_cast<std::size_t>(groups_of(layout.blocks)));
  std::ranges::generate(group_bytes, [&] { return static_cast<std::uint32_t>(random() % 4097); });
  Memory wanted(static_cast<std::size_t>(layout.payload), 0xAB);
  std::int64_t end = 0;
  for (std::size_t group = 0; group < group_bytes.size(); ++group) {
    end += group_bytes[group];
    std::memcpy(wanted.data() + kHeaderBytes + group / kChunkGroups * sizeof end, &end, sizeof end);
  }
  std::fill(wanted.begin() + layout.tags + layout.blocks, wanted.end(), std::uint8_t{0});
  const Quantizer quantizer = Quantizer::make(NumberFormat::kFloat32, 0.5, true);
  const std::int64_t count = layout.blocks * kBlockNumbers;
  const StreamHeader header = make_header(quantizer, count, end);
  std::memcpy(wanted.data(), &header, sizeof header);

  Memory stream(wanted.size(), 0xAB);
  kernels::launch_kernel("finish_kernel", {1, kScanThreads, 0, on}, finish_kernel, make_header(quantizer, count, 0),
                         layout, group_bytes.data(), stream.data());
  expect_done(on, cudaGetLastError());
  EXPECT_EQ(stream, wanted) << chunks;
}

TEST(CodecKernels, EndMoreThanAThousandChunks) {
  const OwnStream on;
  std::uint32_t seed = 0;
  for (const std::int64_t chunks : {1, 2, 1023, 1024, 1025, 2048, 2500}) {
    if (!kFewCases || chunks == 1025) {
      expect_finished(on, chunks, seed % 3 * 331, seed);
    }
    ++seed;
  }
}

bool is_damaged(const Memory& stream) {
  try {
    test::restored(stream, InstructionSet::kPortable);
    return false;
  } catch (const DamagedStream&) {
    return true;
  }
}

TEST(CodecKernels, RefuseWhatTheHostRefuses) {
  const OwnStream on;
  std::mt19937 random(17);
  int refused = 0;
  const std::vector<std::vector<float>> contents = test::contents(kFewCases ? 100 : 40'000);
  const Quantizer quantizer = Quantizer::make(NumberFormat::kFloat32, 0.02, false);
  const unsigned rounds = kFewCases ? 10 : 200;
  for (unsigned round = 0; round < rounds; ++round) {
    const std::vector<float>& values = contents[round % contents.size()];
    const std::size_t most = round % 8 == 0 ? values.size() : std::min<std::size_t>(values.size(), 3000);
    const auto count = static_cast<std::ptrdiff_t>(1 + random() % most);
    const Memory numbers = test::memory_of(NumberFormat::kFloat32, {values.begin(), values.begin() + count});
    Memory stream = test::compressed(quantizer, Choice::kShortest, numbers, InstructionSet::kPortable);
    stream[48 + random() % (stream.size() - 48)] ^= static_cast<std::uint8_t>(1U << random() % 8);
    const bool by_host = is_damaged(stream);
    ASSERT_EQ(restored(on, stream).empty(), by_host) << round;
    refused += by_host;
  }
  EXPECT_GT(refused, static_cast<int>(rounds / 10));
}

TEST(CodecKernels, RefuseStreamsThatAreCutOff) {
  const OwnStream on;
  const std::vector<std::vector<float>> contents = test::contents(kFewCases ? 100 : 33'000);
  const Quantizer quantizer = Quantizer::make(NumberFormat::kFloat32, 0.02, false);
  for (const unsigned which : {0U, 6U}) {
    const Memory numbers = test::memory_of(NumberFormat::kFloat32, contents[which]);
    const Memory stream = test::compressed(quantizer, Choice::kShortest, numbers, InstructionSet::kPortable);
    const StreamHeader header = header_of(stream);
    ASSERT_FALSE(restored(on, header, stream).empty());
    for (const std::ptrdiff_t cut : {1, 4, 200}) {
      if (cut <= header.payload_bytes) {
        EXPECT_TRUE(restored(on, header, {stream.begin(), stream.end() - cut}).empty()) << cut;
      }
    }
  }
}

/// The threads of find_kernel that meet damage say so at once: ThreadSanitizer sees how.
TEST(CodecKernels, RefuseManyDamagedChunks) {
  const OwnStream on;
  const Layout layout(kWalkThreads * kChunkBlocks * kBlockNumbers);
  ASSERT_EQ(layout.chunks, kWalkThreads);
  const Memory stream(static_cast<std::size_t>(layout.payload), 0xFF);  // each chunk ends before its beginning
  std::vector<std::uint32_t> begins(static_cast<std::size_t>(groups_of(layout.blocks)));
  std::uint32_t damaged = 0;
  kernels::launch_kernel("find_kernel", {1, kWalkThreads, 0, on}, find_kernel, NumberFormat::kFloat32, layout,
                         stream.data(), Bytes{0}, begins.data(), &damaged);
  expect_done(on, cudaGetLastError());
  EXPECT_EQ(damaged, 1);
}

// ---- windows --------------------------------------------------------------------------------------------------------

std::int64_t among(std::mt19937_64& random, std::int64_t least, std::int64_t most) {
  return std::uniform_int_distribution<std::int64_t>(least, most)(random);
}

PoolGeometry any_geometry(std::mt19937_64& random) {
  PoolGeometry made;
  for (std::size_t side = 0; side < 2; ++side) {
    made.kernel[side] = among(random, 1, 6);
    made.stride[side] = among(random, 1, 4);
    made.dilation[side] = among(random, 1, 3);
    made.padding[side] = among(random, 0, made.kernel[side] / 2);
    made.outputs[side] = among(random, 1, 9);
  }
  made.input_width = among(random, 1, 40);
  made.planes = among(random, 0, kFewCases ? 2 : 20);
  made.inner = among(random, 1, 3);
  return made;
}

std::vector<std::int64_t> any_indices(const PoolGeometry& pool, std::mt19937_64& random) {
  std::vector<std::int64_t> indices;
  for (std::int64_t row = 0; row < pool.rows(); ++row) {
    for (std::int64_t in_row = 0; in_row < pool.row(); ++in_row) {
      const auto code = static_cast<unsigned>(among(random, 0, pool.area() - 1));
      indices.push_back(pool.begin_of_row(row) + pool.begin_in_row(in_row) + pool.from_begin(code));
    }
  }
  return indices;
}

TEST(WindowKernels, GiveTheCodesOfTheHost) {
  const OwnStream on;
  std::mt19937_64 random(1);
  ThreadPool pool(1);
  const OwnMemory wrong;
  for (int round = 0; round < (kFewCases ? 3 : 200); ++round) {
    const PoolGeometry geometry = any_geometry(random);
    std::vector<std::int64_t> indices = any_indices(geometry, random);
    Memory wanted(static_cast<std::size_t>(geometry.stream_bytes()));
    ASSERT_TRUE(encode_windows(geometry, indices.data(), wanted.data(), pool));
    Memory stream(wanted.size(), 0xAB);
    expect_done(on, launch_encode_windows(geometry, indices.data(), stream.data(), word(wrong), on));
    ASSERT_EQ(stream, wanted);
    ASSERT_EQ(value(wrong, on), 0);
    std::ranges::generate(stream, [&] { return static_cast<std::uint8_t>(random()); });
    for (const Memory& codes : {wanted, stream}) {  // those of the host, and damaged ones
      std::vector<std::int64_t> back(indices.size());
      std::vector<std::int64_t> by_host(indices.size());
      expect_done(on, launch_decode_windows(geometry, codes.data(), back.data(), on));
      decode_windows(geometry, codes.data(), by_host.data(), pool);
      ASSERT_EQ(back, by_host);
    }
    if (!indices.empty()) {
      indices[random() % indices.size()] -= 1'000'000;
      expect_done(on, launch_encode_windows(geometry, indices.data(), stream.data(), word(wrong), on));
      ASSERT_EQ(value(wrong, on), 1);
    }
  }
}

TEST(WindowKernels, TakeSeveralBytesAThreadInASmallGrid) {
  std::mt19937_64 random(2);
  PoolGeometry geometry = any_geometry(random);
  geometry.planes = 40;
  geometry.outputs = {5, 9};
  const std::vector<std::int64_t> indices = any_indices(geometry, random);
  Memory wanted(static_cast<std::size_t>(geometry.stream_bytes()));
  ThreadPool pool(1);
  ASSERT_TRUE(encode_windows(geometry, indices.data(), wanted.data(), pool));
  ASSERT_GT(wanted.size(), 2 * kThreads);
  Memory stream(wanted.size(), 0xAB);
  std::uint32_t wrong = 0;
  kernels::run_grid({"encode_kernel", 2, kThreads, 1},
                    [&] { encode_kernel(geometry, indices.data(), stream.data(), &wrong); });
  EXPECT_EQ(stream, wanted);
  EXPECT_EQ(wrong, 0);
  std::vector<std::int64_t> back(indices.size());
  kernels::run_grid({"decode_kernel", 2, kThreads, 1}, [&] { decode_kernel(geometry, stream.data(), back.data()); });
  EXPECT_EQ(back, indices);
}

}  // namespace
}  // namespace hydra::codec

namespace hydra {
namespace {

using test::Content;
using test::Kind;

TEST(OptimizerKernels, UpdateAsTheHostDoes) {
  const OwnStream on;
  const std::vector<Kind> kinds = test::all_kinds();
  for (std::size_t at = 0; at < kinds.size(); at += kFewCases ? 29 : 1) {
    for (const Content content : {Content::kNumbers, Content::kAnyBits}) {
      for (const float scale : {1.0F, 0.3F}) {
        const std::int64_t count = kFewCases ? 60 : 300;
        test::Memory by_host(kinds[at], count, 1, content, 7);
        test::Memory by_device = by_host;
        for (int step = 0; step < 3; ++step) {
          run_update(by_host.update(), 0, count, scale, InstructionSet::kPortable);
          expect_done(on, launch_update(by_device.update(), scale, on));
        }
        ASSERT_EQ(by_device.differences(by_host), 0) << kinds[at].name << ", scale " << scale;
      }
    }
  }
}

TEST(OptimizerKernels, UpdateAnyCountAndNewWeights) {
  const OwnStream on;
  const Kind kind = test::all_kinds()[6];
  for (const std::int64_t count : {0, 1, 31, 32, 33, 255, 256, 257, kFewCases ? 300 : 5000}) {
    test::Memory by_host(kind, count, 1, Content::kNumbers, 7);
    test::Memory by_device = by_host;
    test::Memory new_by_host = by_host;
    test::Memory new_by_device = by_host;
    ParameterUpdate update = by_host.update();
    update.new_weights = new_by_host.update().weights;
    run_update(update, 0, count, 0.5F, InstructionSet::kPortable);
    update = by_device.update();
    update.new_weights = new_by_device.update().weights;
    expect_done(on, launch_update(update, 0.5F, on));
    ASSERT_EQ(by_device.differences(by_host) + new_by_device.differences(new_by_host), 0) << count;
  }
}

TEST(OptimizerKernels, UpdateSeveralNumbersAThreadInASmallGrid) {
  const Kind kind = test::all_kinds()[0];
  test::Memory by_host(kind, 1000, 1, Content::kNumbers, 7);
  test::Memory by_device = by_host;
  run_update(by_host.update(), 0, 1000, 1.0F, InstructionSet::kPortable);
  kernels::run_grid({"update_kernel", 3, 64, 1}, [&] { update_kernel(by_device.update(), 1.0F); });
  EXPECT_EQ(by_device.differences(by_host), 0);
}

TEST(OptimizerKernels, SumSquaresAsTheHostDoes) {
  const OwnStream on;
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  for (const NumberFormat format : codec::test::kFormats) {
    for (const std::int64_t count : {std::int64_t{0}, std::int64_t{1}, std::int64_t{31}, std::int64_t{33},
                                     kNormChunk - 1, kNormChunk, kNormChunk + 1, 3 * kNormChunk + 77}) {
      if (kFewCases && count > kNormChunk + 1) {
        continue;
      }
      std::vector<float> values(static_cast<std::size_t>(count));
      std::ranges::generate(values, [&] { return normal(random); });
      const codec::test::Memory numbers = codec::test::memory_of(format, values);
      const NormInput input{numbers.data(), format, count};
      std::vector<double> found(static_cast<std::size_t>(norm_chunks(input)), -1.0);
      expect_done(on, launch_chunk_sums(input, found.data(), on));
      for (std::int64_t chunk = 0; chunk < norm_chunks(input); ++chunk) {
        const std::int64_t begin = chunk * kNormChunk;
        const double wanted = chunk_sum_of_squares(numbers.data() + begin * bytes_of(format), format,
                                                   std::min(kNormChunk, count - begin), InstructionSet::kPortable);
        ASSERT_EQ(std::bit_cast<std::uint64_t>(found[static_cast<std::size_t>(chunk)]),
                  std::bit_cast<std::uint64_t>(wanted))
            << count;
      }
    }
  }
}

}  // namespace
}  // namespace hydra

namespace hydra {
namespace {

template <class Item>
std::uint64_t place_sum(const Item* items, const PlaceLayout& layout) {
  std::uint64_t sum = 0;
  std::int64_t place = 0;
  const auto visit = [&](const auto& self, int dimension, std::int64_t offset) -> void {
    if (dimension == layout.dimensions) {
      std::uint64_t mix = static_cast<std::uint64_t>(std::int64_t{items[offset]}) * kPlaceFactor1;
      mix += static_cast<std::uint64_t>(place++) * kPlaceFactor2;
      mix = (mix ^ static_cast<std::uint64_t>(static_cast<std::int64_t>(mix) >> kPlaceShift1)) * kPlaceFactor3;
      sum += mix ^ static_cast<std::uint64_t>(static_cast<std::int64_t>(mix) >> kPlaceShift2);
      return;
    }
    const auto at = static_cast<std::size_t>(dimension);
    for (std::int64_t i = 0; i < layout.sizes.at(at); ++i) {
      self(self, dimension + 1, offset + i * layout.strides.at(at));
    }
  };
  visit(visit, 0, 0);
  return sum;
}

template <class Item>
void expect_place_sum(const PlaceLayout& layout, std::size_t count) {
  std::mt19937_64 random(1);
  std::vector<Item> items(count);
  std::ranges::generate(items, [&] { return static_cast<Item>(random()); });
  const OwnStream on;
  unsigned long long sum = 5;
  expect_done(on, launch_place_sum(items.data(), sizeof(Item), layout, &sum, on));
  EXPECT_EQ(sum, 5 + place_sum(items.data(), layout));
}

TEST(PlaceSumKernel, GivesTheSumOfTheHost) {
  const std::vector<std::pair<PlaceLayout, std::size_t>> layouts{
      {{1, {1}, {1}}, 1},
      {{1, {9000}, {1}}, 9000},
      {{1, {300}, {3}}, 898},
      {{2, {70, 40}, {1, 70}}, 2800},     // transposed
      {{3, {3, 50, 7}, {0, 9, 1}}, 448},  // repeated, and rows with gaps
      {{5, {2, 3, 4, 5, 6}, {1, 2, 6, 24, 120}}, 720},
  };
  for (const auto& [layout, count] : layouts) {
    expect_place_sum<std::int8_t>(layout, count);
    expect_place_sum<std::int16_t>(layout, count);
    expect_place_sum<std::int32_t>(layout, count);
    expect_place_sum<std::int64_t>(layout, count);
  }
}

}  // namespace
}  // namespace hydra
