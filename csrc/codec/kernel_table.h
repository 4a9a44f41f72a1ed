// The table of a kernels_*.cpp's encode_as() and decode_as(): included inside its namespace. No include guard, on
// purpose.

template <NumberFormat F>
std::uint8_t* encode_with(const Quantizer& quantizer, Choice choice, const std::uint8_t* numbers, std::int64_t blocks,
                          std::uint8_t* tags, std::uint8_t* payload) {
  return choice == Choice::kShortest ? encode_as<F, Choice::kShortest>(quantizer, numbers, blocks, tags, payload)
                                     : encode_as<F, Choice::kSigned>(quantizer, numbers, blocks, tags, payload);
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
