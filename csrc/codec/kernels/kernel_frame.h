// The loops over blocks that all kernels with vectors share, and their table.
//
// A kernels_*.cpp includes this file inside its namespace, after batch.h, when it has defined HYDRA_KERNEL and
//   BlockQuanta               32 quanta of 16 bits, in registers
//   quantize<F, C>()          finds the quanta and the summary of block i; for Choice::kSigned, least_flipped is of the
//                             magnitudes, and `least` and `nonzero` are unused
//   put_signed(), put_block() write a block's payload, and may overwrite up to kSlackBytes behind it
//   decode_as<F>()            decodes as Kernels::decode does (kernels.h)
// The file has no include guard on purpose.

template <NumberFormat F>
HYDRA_INLINE std::uint8_t* put_raw(std::uint8_t* to, const std::uint8_t* numbers) {
  std::memcpy(to, numbers, kBlockBytes<F>);
  return to + kBlockBytes<F>;
}

template <NumberFormat F>
HYDRA_KERNEL std::uint8_t* encode_signed(Quantizer quantizer, const std::uint8_t* numbers, std::int64_t blocks,
                                         std::uint8_t* tags, std::uint8_t* payload) {
  Batch one;
  for (std::int64_t block = 0; block < blocks; ++block, numbers += kBlockBytes<F>) {
    const BlockQuanta quanta = quantize<F, Choice::kSigned>(quantizer, numbers, one, 0);
    if (one.fitting[0] != ~0U) [[unlikely]] {
      tags[block] = kRawTag;
      payload = put_raw<F>(payload, numbers);
      continue;
    }
    const std::uint32_t signs = one.negative[0] | one.negative_zeros[0];
    const auto width = static_cast<int>(std::bit_width(static_cast<unsigned>(highest_of(one.least_flipped[0]))));
    const Tag tag{Mode::kSigned, signs != 0, width};
    tags[block] = tag.byte();
    payload = put_signed(payload, quanta, signs, tag);
  }
  return payload;
}

template <NumberFormat F>
HYDRA_KERNEL std::uint8_t* encode_shortest(Quantizer quantizer, const std::uint8_t* numbers, std::int64_t blocks,
                                           std::uint8_t* tags, std::uint8_t* payload) {
  Batch batch;
  BlockQuanta quanta[kBatch];
  for (std::int64_t first = 0; first < blocks; first += kBatch) {
    const auto there = static_cast<std::size_t>(blocks - first < kBatch ? blocks - first : kBatch);
    for (std::size_t i = 0; i < there; ++i) {
      const std::uint8_t* from = numbers + static_cast<std::int64_t>(i) * kBlockBytes<F>;
      quanta[i] = quantize<F, Choice::kShortest>(quantizer, from, batch, i);
    }
    choose_tags(batch);
    for (std::size_t i = 0; i < there; ++i, numbers += kBlockBytes<F>) {
      const auto byte = static_cast<std::uint8_t>(batch.tags[i]);
      *tags++ = byte;
      if (byte == kRawTag) [[unlikely]] {
        payload = put_raw<F>(payload, numbers);
      } else {
        payload = put_block(payload, quanta[i], batch, i, Tag::of(byte));
      }
    }
  }
  return payload;
}

template <NumberFormat F>
std::uint8_t* encode_with(const Quantizer& quantizer, Choice choice, const std::uint8_t* numbers, std::int64_t blocks,
                          std::uint8_t* tags, std::uint8_t* payload) {
  return choice == Choice::kShortest ? encode_shortest<F>(quantizer, numbers, blocks, tags, payload)
                                     : encode_signed<F>(quantizer, numbers, blocks, tags, payload);
}

std::uint8_t* encode(const Quantizer& quantizer, Choice choice, const void* numbers, std::int64_t blocks,
                     std::uint8_t* tags, std::uint8_t* payload) noexcept {
  const auto* from = static_cast<const std::uint8_t*>(numbers);
  switch (quantizer.format) {
    case NumberFormat::kBfloat16:
      return encode_with<NumberFormat::kBfloat16>(quantizer, choice, from, blocks, tags, payload);
    case NumberFormat::kFloat16:
      return encode_with<NumberFormat::kFloat16>(quantizer, choice, from, blocks, tags, payload);
    default:
      return encode_with<NumberFormat::kFloat32>(quantizer, choice, from, blocks, tags, payload);
  }
}

Decoded decode(const Quantizer& quantizer, const std::uint8_t* tags, std::int64_t blocks, const std::uint8_t* payload,
               const std::uint8_t* end, void* numbers) noexcept {
  auto* to = static_cast<std::uint8_t*>(numbers);
  switch (quantizer.format) {
    case NumberFormat::kBfloat16:
      return decode_as<NumberFormat::kBfloat16>(quantizer, tags, blocks, payload, end, to);
    case NumberFormat::kFloat16:
      return decode_as<NumberFormat::kFloat16>(quantizer, tags, blocks, payload, end, to);
    default:
      return decode_as<NumberFormat::kFloat32>(quantizer, tags, blocks, payload, end, to);
  }
}

constexpr Kernels kTable = {encode, decode};
