#include "csrc/codec/codec.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "csrc/base/errors.h"
#include "csrc/base/float_mode.h"
#include "csrc/codec/kernels/kernels.h"
#include "csrc/codec/layout.h"

namespace hydra::codec {

namespace {

static_assert(std::endian::native == std::endian::little);

/// One call's work on the numbers of a stream.
class Encoder {
 public:
  Encoder(const Quantizer& quantizer, Choice choice, const void* numbers, std::int64_t count,
          InstructionSet instructions)
      : quantizer_(quantizer),
        choice_(choice),
        numbers_(static_cast<const std::uint8_t*>(numbers)),
        whole_blocks_(count / kBlockNumbers),
        left_(count % kBlockNumbers),
        layout_(count),
        kernels_(kernels(instructions)) {}

  /// Returns the end of the chunk's payload.
  std::uint8_t* chunk(std::int64_t chunk, std::uint8_t* tags, std::uint8_t* payload) const {
    const StandardFloatMode standard;
    const std::int64_t first = chunk * kChunkBlocks;
    const std::int64_t whole = std::min(layout_.blocks_of(chunk), whole_blocks_ - first);
    const Bytes bytes = block_bytes(quantizer_.format);
    payload = kernels_.encode(quantizer_, choice_, numbers_ + first * bytes, whole, tags, payload);
    if (whole == layout_.blocks_of(chunk)) {
      return payload;
    }
    std::array<std::uint8_t, kMostBlockBytes> last{};
    std::memcpy(last.data(), numbers_ + whole_blocks_ * bytes,
                static_cast<std::size_t>(left_ * bytes_of(quantizer_.format)));
    return kernels_.encode(quantizer_, choice_, last.data(), 1, tags + whole, payload);
  }

 private:
  const Quantizer& quantizer_;
  Choice choice_;
  const std::uint8_t* numbers_;
  std::int64_t whole_blocks_;
  std::int64_t left_;
  Layout layout_;
  const Kernels& kernels_;
};

void put_end(std::uint8_t* stream, std::int64_t chunk, std::int64_t end) {
  std::memcpy(stream + kHeaderBytes + 8 * chunk, &end, sizeof end);
}

/// Encodes several chunks at a time into separate scratch memory, then copies them side by side.
Bytes encode_in_waves(const Encoder& encoder, const Layout& layout, Bytes most, std::uint8_t* to, ThreadPool& threads) {
  const std::int64_t width = std::min<std::int64_t>(4L * threads.threads(), layout.chunks);
  const Bytes room = most + kSlackBytes;
  std::vector<std::uint8_t> scratch(static_cast<std::size_t>(width * room));
  std::vector<Bytes> sizes(static_cast<std::size_t>(width));
  Bytes end = 0;
  for (std::int64_t first = 0; first < layout.chunks; first += width) {
    const std::int64_t count = std::min(width, layout.chunks - first);
    threads.parallel_for(count, [&](std::int64_t i) {
      std::uint8_t* payload = scratch.data() + i * room;
      std::uint8_t* tags = to + layout.tags + (first + i) * kChunkBlocks;
      sizes[static_cast<std::size_t>(i)] = encoder.chunk(first + i, tags, payload) - payload;
    });
    std::vector<Bytes> begins;
    for (std::int64_t i = 0; i < count; ++i) {
      begins.push_back(end);
      end += sizes[static_cast<std::size_t>(i)];
      put_end(to, first + i, end);
    }
    threads.parallel_for(count, [&](std::int64_t i) {
      const auto at = static_cast<std::size_t>(i);
      std::memcpy(to + layout.payload + begins[at], scratch.data() + i * room, static_cast<std::size_t>(sizes[at]));
    });
  }
  return end;
}

Bytes encode_in_order(const Encoder& encoder, const Layout& layout, std::uint8_t* to) {
  std::uint8_t* const begin = to + layout.payload;
  std::uint8_t* end = begin;
  for (std::int64_t chunk = 0; chunk < layout.chunks; ++chunk) {
    end = encoder.chunk(chunk, to + layout.tags + chunk * kChunkBlocks, end);
    put_end(to, chunk, end - begin);
  }
  return end - begin;
}

[[noreturn]] void damaged(const std::string& what) {
  throw DamagedStream("not a complete stream of compressed numbers: " + what);
}

/// One call's work on a stream.
class Decoder {
 public:
  Decoder(const StreamHeader& header, std::span<const std::uint8_t> stream, void* numbers, InstructionSet instructions)
      : header_(header),
        stream_(stream),
        numbers_(static_cast<std::uint8_t*>(numbers)),
        layout_(header.count),
        kernels_(kernels(instructions)) {
    quantizer_.format = header.format;
    quantizer_.step = header.step;
  }

  const Layout& layout() const noexcept { return layout_; }

  void chunk(std::int64_t chunk) const {
    const StandardFloatMode standard;
    const std::int64_t begin = chunk == 0 ? 0 : end_of(chunk - 1);
    const std::int64_t end = end_of(chunk);
    if (begin < 0 || begin > end || end > header_.payload_bytes) {
      damaged("the end of chunk " + std::to_string(chunk) + " is before its beginning, or behind the payload");
    }
    const std::uint8_t* tags = stream_.data() + layout_.tags + chunk * kChunkBlocks;
    check(tags, layout_.blocks_of(chunk));
    const std::uint8_t* payload = stream_.data() + layout_.payload;
    const Bytes bytes = block_bytes(header_.format);
    const std::int64_t first = chunk * kChunkBlocks;
    const std::int64_t whole = std::min(layout_.blocks_of(chunk), header_.count / kBlockNumbers - first);
    const std::uint8_t* stream_end = stream_.data() + stream_.size();
    Decoded done = kernels_.decode(quantizer_, tags, whole, payload + begin, stream_end, numbers_ + first * bytes);
    if (done.payload > payload + end) {
      damaged("chunk " + std::to_string(chunk) + " is longer than its end says");
    }
    decode_end(chunk, tags, done, payload + end);
  }

 private:
  /// Decodes from a padded copy the blocks too close to the stream's end to be read in place, and a partial last block.
  void decode_end(std::int64_t chunk, const std::uint8_t* tags, Decoded done, const std::uint8_t* end) const {
    std::array<std::uint8_t, 2 * kSlackBytes + kMostBlockBytes> copy{};
    std::array<std::uint8_t, kMostBlockBytes> block;
    const Bytes bytes = block_bytes(header_.format);
    const std::int64_t first = chunk * kChunkBlocks;
    for (std::int64_t at = done.blocks; at < layout_.blocks_of(chunk); ++at) {
      const Bytes there = std::min<Bytes>(end - done.payload, kSlackBytes + kMostBlockBytes);
      copy.fill(0);
      std::memcpy(copy.data(), done.payload, static_cast<std::size_t>(there));
      const Decoded one =
          kernels_.decode(quantizer_, tags + at, 1, copy.data(), copy.data() + copy.size(), block.data());
      if (one.payload - copy.data() > there) {
        damaged("chunk " + std::to_string(chunk) + " is longer than its end says");
      }
      done.payload += one.payload - copy.data();
      const std::int64_t index = first + at;
      const std::int64_t count = std::min<std::int64_t>(kBlockNumbers, header_.count - index * kBlockNumbers);
      std::memcpy(numbers_ + index * bytes, block.data(), static_cast<std::size_t>(count * bytes_of(header_.format)));
    }
    if (done.payload != end) {
      damaged("chunk " + std::to_string(chunk) + " is shorter than its end says");
    }
  }

  void check(const std::uint8_t* tags, std::int64_t blocks) const {
    bool valid = true;
    for (std::int64_t block = 0; block < blocks; ++block) {
      valid = valid && kValid[tags[block]];
    }
    if (!valid) {
      damaged("a tag is invalid");
    }
  }

  std::int64_t end_of(std::int64_t chunk) const {
    std::int64_t end = 0;
    std::memcpy(&end, stream_.data() + kHeaderBytes + 8 * chunk, sizeof end);
    return end;
  }

  static constexpr std::array<bool, 256> kValid = [] {
    std::array<bool, 256> valid{};
    for (unsigned byte = 0; byte < 256; ++byte) {
      valid[byte] = Tag::of(static_cast<std::uint8_t>(byte)).valid();
    }
    return valid;
  }();

  StreamHeader header_;
  std::span<const std::uint8_t> stream_;
  std::uint8_t* numbers_;
  Layout layout_;
  const Kernels& kernels_;
  Quantizer quantizer_;
};

}  // namespace

Bytes most_bytes(NumberFormat format, std::int64_t count) noexcept {
  const Layout layout(count);
  return layout.payload + layout.blocks * block_bytes(format) + kSlackBytes;
}

Bytes compress(const Quantizer& quantizer, Choice choice, const void* numbers, std::int64_t count, std::uint8_t* to,
               ThreadPool& threads, InstructionSet instructions) {
  const Layout layout(count);
  const Encoder encoder(quantizer, choice, numbers, count, instructions);
  std::memset(to + layout.tags, 0, static_cast<std::size_t>(layout.payload - layout.tags));
  const bool together = threads.threads() > 1 && layout.chunks > 1;
  const Bytes most = kChunkBlocks * block_bytes(quantizer.format);
  const Bytes payload_bytes =
      together ? encode_in_waves(encoder, layout, most, to, threads) : encode_in_order(encoder, layout, to);
  const StreamHeader header = make_header(quantizer, count, payload_bytes);
  std::memcpy(to, &header, sizeof header);
  return layout.payload + payload_bytes;
}

Bytes stream_bytes(const StreamHeader& header) noexcept { return Layout(header.count).payload + header.payload_bytes; }

StreamHeader header_of(std::span<const std::uint8_t> begin, Bytes size) {
  StreamHeader header;
  if (begin.size() < sizeof header) {
    damaged("it has " + std::to_string(begin.size()) + " bytes, fewer than a header");
  }
  std::memcpy(&header, begin.data(), sizeof header);
  if (header.magic != kMagic) {
    damaged("it does not begin with the magic bytes");
  }
  if (header.version != kVersion) {
    damaged("its version is " + std::to_string(header.version) + ", and this build reads version " +
            std::to_string(kVersion));
  }
  // Each block has a tag, so the stream's size limits its count of numbers.
  if (header.format > NumberFormat::kFloat16 || header.count < 0 || header.count / kBlockNumbers > size ||
      header.payload_bytes < 0 || header.payload_bytes > size) {
    damaged("its header has impossible values");
  }
  if (stream_bytes(header) != size) {
    damaged("it has " + std::to_string(size) + " bytes, and its header says " + std::to_string(stream_bytes(header)));
  }
  return header;
}

void decompress(std::span<const std::uint8_t> stream, void* numbers, ThreadPool& threads, InstructionSet instructions) {
  const StreamHeader header = header_of(stream);
  const Decoder decoder(header, stream, numbers, instructions);
  const std::int64_t chunks = decoder.layout().chunks;
  threads.parallel_for(chunks, [&](std::int64_t chunk) { decoder.chunk(chunk); });
}

}  // namespace hydra::codec
