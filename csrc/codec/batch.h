// Blocks in batches: their quanta and what their tags are chosen by are found first, then all tags at once, then the
// payloads are written. Each of the three is a loop without long chains; in one loop a block would wait for its own
// tag. A kernels_*.cpp with vectors includes this file inside its namespace, after it has defined HYDRA_INLINE. No
// include guard, on purpose.

constexpr int kBatch = 32;

template <class T>
using OfEach = std::array<T, kBatch>;

/// What is known of each block.
struct alignas(64) Batch {
  // In their lower halves the least quantum with 0x8000 flipped, and with 0x7FFF flipped, which is of the highest.
  OfEach<std::int32_t> least{};
  OfEach<std::int32_t> least_flipped{};
  OfEach<std::uint32_t> nonzero{};
  OfEach<std::uint32_t> negative{};
  OfEach<std::uint32_t> negative_zeros{};
  OfEach<std::uint32_t> fitting{};  // not all: the block is kept as it is
  OfEach<std::int32_t> lowest{};
  OfEach<std::int32_t> tags{};
};

HYDRA_INLINE int highest_of(int least_flipped) { return 0x7FFF - (least_flipped & 0xFFFF); }

HYDRA_INLINE void choose_tags(Batch& batch) {
  OfEach<std::int32_t> counts;
  for (std::size_t i = 0; i < kBatch; ++i) {
    counts[i] = std::popcount(batch.nonzero[i]);
  }
  for (std::size_t i = 0; i < kBatch; ++i) {
    const int lowest = (batch.least[i] & 0xFFFF) - 0x8000;
    const int tag = shortest(lowest, highest_of(batch.least_flipped[i]), counts[i], batch.negative[i] != 0,
                             batch.negative_zeros[i] != 0);
    batch.lowest[i] = lowest;
    batch.tags[i] = batch.fitting[i] == ~0U ? tag : kRawTag;
  }
}
