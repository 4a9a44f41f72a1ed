// The source of the CUDA kernels on a warp that loops over 32 lanes gives the bytes of the host's kernels.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>

#include "csrc/base/errors.h"
#include "csrc/codec/layout.h"
#include "tests/cpp/codec/contents.h"
#include "tests/cpp/codec/support.h"

namespace hydra::codec {
namespace {

#define HYDRA_INLINE inline

struct Warp {
  template <class T>
  using Each = std::array<T, 32>;

  template <class F>
  static void each(F body) {
    for (int lane = 0; lane < 32; ++lane) {
      body(lane);
    }
  }
  template <class F>
  static std::uint32_t ballot(F condition) {
    std::uint32_t word = 0;
    each([&](int lane) { word |= condition(lane) ? 1U << lane : 0; });
    return word;
  }
  static int least(const Each<int>& each) { return *std::ranges::min_element(each); }
  static int greatest(const Each<int>& each) { return *std::ranges::max_element(each); }
  static std::uint32_t sum(const Each<std::uint32_t>& each) {
    std::uint32_t total = 0;
    for (const std::uint32_t value : each) {
      total += value;
    }
    return total;
  }
  static void add_bits(std::uint32_t& word, std::uint32_t bits) { word |= bits; }
  static void meet() {}
};

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wsign-conversion"  // for indices of std::array
#include "csrc/codec/warp_block.h"
#include "csrc/codec/warp_group.h"
#pragma GCC diagnostic pop

using test::Memory;

/// Runs the kernels in the order of cuda_codec.cu.
Memory compressed_by_warps(const Quantizer& quantizer, Choice choice, const Memory& numbers) {
  const auto count = static_cast<std::int64_t>(numbers.size()) / hydra::bytes_of(quantizer.format);
  const Layout layout(count);
  const NumberArray<const void*> from{numbers.data(), count, layout.blocks};
  Memory stream(static_cast<std::size_t>(layout.payload));
  std::vector<std::uint32_t> group_bytes;
  for (std::int64_t group = 0; group < groups_of(layout.blocks); ++group) {
    group_bytes.push_back(measure_group(quantizer, choice, from, group, stream.data() + layout.tags));
  }
  std::int64_t end = 0;
  std::int64_t chunk_begin = 0;
  std::vector<std::int64_t> begins;
  for (std::int64_t group = 0; group < groups_of(layout.blocks); ++group) {
    chunk_begin = group % kChunkGroups == 0 ? end : chunk_begin;
    begins.push_back(chunk_begin + bytes_before(group_bytes.data(), group));
    end += group_bytes[static_cast<std::size_t>(group)];
    std::memcpy(stream.data() + kHeaderBytes + 8 * (group / kChunkGroups), &end, sizeof end);
  }
  stream.resize(static_cast<std::size_t>(layout.payload + end));
  for (std::int64_t group = 0; group < groups_of(layout.blocks); ++group) {
    std::array<std::uint32_t, kStagedWords> words;
    write_group(quantizer, choice, from, group, words.data(),
                stream.data() + layout.payload + begins[static_cast<std::size_t>(group)]);
  }
  const StreamHeader header = make_header(quantizer, count, end);
  std::memcpy(stream.data(), &header, sizeof header);
  return stream;
}

/// Returns no numbers if the bytes are damaged.
Memory restored_by_warps(const Memory& stream) {
  const StreamHeader header = header_of(stream);
  const Layout layout(header.count);
  Memory numbers(static_cast<std::size_t>(header.count * hydra::bytes_of(header.format)));
  const NumberArray<void*> to{numbers.data(), header.count, layout.blocks};
  std::vector<std::uint32_t> begins(static_cast<std::size_t>(layout.chunks * kChunkGroups));
  std::vector<std::int64_t> ends(static_cast<std::size_t>(layout.chunks + 1));
  if (layout.chunks > 0) {
    std::memcpy(ends.data() + 1, stream.data() + kHeaderBytes, static_cast<std::size_t>(8 * layout.chunks));
  }
  const std::uint8_t* tags = stream.data() + layout.tags;
  const std::uint8_t* payload = stream.data() + layout.payload;
  for (std::int64_t chunk = 0; chunk < layout.chunks; ++chunk) {
    const std::int64_t begin = ends[static_cast<std::size_t>(chunk)];
    const std::int64_t end = ends[static_cast<std::size_t>(chunk + 1)];
    if (begin < 0 || begin > end || end > header.payload_bytes ||
        !find_groups(header.format, tags + chunk * kChunkBlocks, layout.blocks_of(chunk), payload + begin, end - begin,
                     begins.data() + chunk * kChunkGroups)) {
      return {};
    }
  }
  for (std::int64_t group = 0; group < groups_of(layout.blocks); ++group) {
    std::array<std::uint32_t, kStagedWords> words;
    read_group(header.format, header.step, to, group, tags,
               payload + ends[static_cast<std::size_t>(group / kChunkGroups)] + begins[static_cast<std::size_t>(group)],
               words.data());
  }
  return numbers;
}

TEST(CodecWarp, WritesAndReadsTheStreamsOfTheHost) {
  for (const NumberFormat format : test::kFormats) {
    for (const bool keep_signs : {false, true}) {
      for (const float bound : {0.0F, 1e-3F, 0.01F, 0.3F, 2.0F}) {
        const Quantizer quantizer = Quantizer::make(format, bound, keep_signs);
        for (const std::vector<float>& values : test::contents(32 * 1100 + 13)) {
          const Memory numbers = test::memory_of(format, values);
          for (const Choice choice : test::kChoices) {
            const Memory stream = test::compressed(quantizer, choice, numbers, InstructionSet::kPortable);
            ASSERT_EQ(compressed_by_warps(quantizer, choice, numbers), stream) << bound;
            ASSERT_EQ(restored_by_warps(stream), test::restored(stream, InstructionSet::kPortable)) << bound;
          }
        }
      }
    }
  }
}

TEST(CodecWarp, TakesAnyCount) {
  const std::vector<float> values = test::contents(2 * 32768 + 200)[0];
  const Quantizer quantizer = Quantizer::make(NumberFormat::kFloat32, 0.05F, false);
  for (const int count : {0, 1, 31, 32, 33, 1023, 1024, 1025, 32767, 32768, 32769, 65536, 65537}) {
    const Memory numbers = test::memory_of(NumberFormat::kFloat32, {values.begin(), values.begin() + count});
    const Memory stream = test::compressed(quantizer, Choice::kShortest, numbers, InstructionSet::kPortable);
    ASSERT_EQ(compressed_by_warps(quantizer, Choice::kShortest, numbers), stream) << count;
    ASSERT_EQ(restored_by_warps(stream), test::restored(stream, InstructionSet::kPortable)) << count;
  }
}

/// Refuses what the host refuses, and reads and writes no other memory (AddressSanitizer runs this too).
TEST(CodecWarp, RefusesDamagedStreams) {
  std::mt19937 random(17);
  int refused = 0;
  const std::vector<std::vector<float>> contents = test::contents(40'000);
  for (unsigned round = 0; round < 300; ++round) {
    const std::vector<float>& values = contents[round % contents.size()];
    const auto count = static_cast<std::ptrdiff_t>(1 + random() % values.size());
    const Quantizer quantizer = Quantizer::make(NumberFormat::kFloat32, 0.02F, false);
    const Memory numbers = test::memory_of(NumberFormat::kFloat32, {values.begin(), values.begin() + count});
    Memory stream = test::compressed(quantizer, Choice::kShortest, numbers, InstructionSet::kPortable);
    stream[48 + random() % (stream.size() - 48)] ^= static_cast<std::uint8_t>(1U << random() % 8);
    bool by_host = false;
    try {
      test::restored(stream, InstructionSet::kPortable);
    } catch (const DamagedStream&) {
      by_host = true;
    }
    ASSERT_EQ(restored_by_warps(stream).empty(), by_host) << round;
    refused += by_host;
  }
  EXPECT_GT(refused, 30);
}

/// Does not read the word with the length if the payload ends before it (AddressSanitizer runs this too).
TEST(CodecWarp, RefusesASparseBlockThatIsCutOff) {
  const Memory two(2);
  EXPECT_GT(bytes_at(NumberFormat::kFloat32, Tag{Mode::kSparse, false, 1}, two.data(), 2), 2);
}

}  // namespace
}  // namespace hydra::codec
