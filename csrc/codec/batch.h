// Batches of blocks, for the encoders with vectors.
//
// Three loops follow each other: the first finds quanta and block summaries, the second chooses all tags, the third
// writes payloads. None has a long dependency chain; in a single loop each block would wait for its own tag.
// A kernels_*.cpp with vectors includes this file inside its namespace, after it has defined HYDRA_INLINE.
// The file has no include guard on purpose.

constexpr int kBatch = 32;

template <class T>
using OfEach = std::array<T, kBatch>;

/// Summaries and tags of the blocks of one batch.
struct alignas(64) Batch {
  // In their lower halves: the minima of the quanta XOR 0x8000, and of the quanta XOR 0x7FFF. The second gives the
  // highest quantum.
  OfEach<std::int32_t> least{};
  OfEach<std::int32_t> least_flipped{};
  OfEach<std::uint32_t> nonzero{};
  OfEach<std::uint32_t> negative{};
  OfEach<std::uint32_t> negative_zeros{};
  OfEach<std::uint32_t> fitting{};  // a bit for each number; unless all are set, the block is stored raw
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
