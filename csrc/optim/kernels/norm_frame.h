// The loop over squares, for instruction sets whose vectors have 16 numbers. Included as kernel_frame.h is. Besides
// Vector it needs
//
//   Sums                           kNormLanes sums in registers
//   load_sums(), store_sums()      move the sums from and to memory
//   add_row(sums, first, second)   adds the squares of kNormLanes numbers

template <NumberFormat kFormat>
HYDRA_INLINE Vector::Float load_numbers(const void* data, std::int64_t at) {
  if constexpr (kFormat == NumberFormat::kFloat32) {
    return Vector::load(static_cast<const float*>(data) + at);
  } else if constexpr (kFormat == NumberFormat::kBfloat16) {
    return Vector::load_bfloat16(static_cast<const std::uint16_t*>(data) + at);
  } else {
    return Vector::load_float16(static_cast<const std::uint16_t*>(data) + at);
  }
}

/// Returns the place where it stopped, less than a row before the end.
template <NumberFormat kFormat>
HYDRA_KERNEL std::int64_t add_rows(const void* data, std::int64_t count, double* lanes) {
  Sums sums = load_sums(lanes);
  std::int64_t at = 0;
  for (; at + kNormLanes <= count; at += kNormLanes) {
    add_row(sums, load_numbers<kFormat>(data, at), load_numbers<kFormat>(data, at + Vector::kWidth));
  }
  store_sums(lanes, sums);
  return at;
}

void add_squares(const void* data, NumberFormat format, std::int64_t count, double* lanes) noexcept {
  std::int64_t done;
  switch (format) {
    case NumberFormat::kFloat32:
      done = add_rows<NumberFormat::kFloat32>(data, count, lanes);
      break;
    case NumberFormat::kBfloat16:
      done = add_rows<NumberFormat::kBfloat16>(data, count, lanes);
      break;
    default:
      done = add_rows<NumberFormat::kFloat16>(data, count, lanes);
  }
  kPortableKernels.add_squares(static_cast<const char*>(data) + done * bytes_of(format), format, count - done, lanes);
}
