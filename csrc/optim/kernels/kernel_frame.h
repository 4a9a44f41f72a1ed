// The loops of updates, written once for every instruction set. A kernels_*.cpp includes this file inside a namespace
// of its own, after it has defined there
//
//   HYDRA_INLINE, HYDRA_KERNEL   specifiers with the target of its instruction set
//   Vector                       kWidth numbers in registers (Float) or their bits (Bits), and the operations on them
//
// Every operation is a member of Vector, so that the compiler fuses and reorders none. Each loop returns where it
// stopped: numbers at the end that fill no vector are the caller's. The file has no include guard on purpose.

/// The streams of an update, as locals that no store can alias.
struct Streams {
  const std::uint16_t* short_weights;
  std::uint16_t* new_short_weights;
  const float* weights;  // fp32 weights, or their fp32 master
  float* new_weights;
  std::int16_t* lower;  // the split's lower halves
  const void* gradient;
  float* moment1;
  float* moment2;
  std::uint16_t* short_moment1;
  std::uint16_t* short_moment2;
  NumberFormat weight_format;
  NumberFormat gradient_format;
  std::uint32_t seed;
  bool scaled;
  Vector::Float scale;
};

HYDRA_INLINE Streams streams_of(const ParameterUpdate& update, float scale) {
  const bool master = update.layout == WeightLayout::kMaster;
  void* const written = update.new_weights != nullptr ? update.new_weights : update.weights;
  return {
      .short_weights = static_cast<const std::uint16_t*>(update.weights),
      .new_short_weights = static_cast<std::uint16_t*>(written),
      .weights = static_cast<const float*>(master ? update.master : update.weights),
      .new_weights = static_cast<float*>(master ? update.master : written),
      .lower = static_cast<std::int16_t*>(update.master),
      .gradient = update.gradient,
      .moment1 = static_cast<float*>(update.first_moment),
      .moment2 = static_cast<float*>(update.second_moment),
      .short_moment1 = static_cast<std::uint16_t*>(update.first_moment),
      .short_moment2 = static_cast<std::uint16_t*>(update.second_moment),
      .weight_format = update.weight_format,
      .gradient_format = update.gradient_format,
      .seed = update.seed,
      .scaled = scale != 1.0F,
      .scale = Vector::broadcast(scale),
  };
}

HYDRA_INLINE Vector::Float load_gradient(const Streams& streams, std::int64_t at) {
  switch (streams.gradient_format) {
    case NumberFormat::kFloat32:
      return Vector::mul(Vector::load(static_cast<const float*>(streams.gradient) + at), streams.scale);
    case NumberFormat::kBfloat16: {
      const auto gradient = Vector::load_bfloat16(static_cast<const std::uint16_t*>(streams.gradient) + at);
      return streams.scaled ? Vector::to_bfloat16(Vector::mul(gradient, streams.scale)) : gradient;
    }
    default: {
      const auto gradient = Vector::load_float16(static_cast<const std::uint16_t*>(streams.gradient) + at);
      return streams.scaled ? Vector::to_float16(Vector::mul(gradient, streams.scale)) : gradient;
    }
  }
}

template <bool kSplit>
HYDRA_INLINE Vector::Float load_weights(const Streams& streams, std::int64_t at) {
  if constexpr (kSplit) {
    return Vector::load_split(streams.short_weights + at, streams.lower + at);
  } else {
    return Vector::load(streams.weights + at);
  }
}

template <bool kSplit>
HYDRA_INLINE void store_weights(const Streams& streams, std::int64_t at, Vector::Float weights) {
  if constexpr (kSplit) {
    Vector::store_split(streams.new_short_weights + at, streams.lower + at, weights);
  } else {
    Vector::store(streams.new_weights + at, weights);
    if (streams.weight_format == NumberFormat::kBfloat16) {
      Vector::store_bfloat16_half_up(streams.new_short_weights + at, weights);
    } else if (streams.weight_format == NumberFormat::kFloat16) {
      Vector::store_float16(streams.new_short_weights + at, weights);
    }
  }
}

template <bool kShort>
HYDRA_INLINE Vector::Float load_moment(const float* moment, const std::uint16_t* short_moment, std::int64_t at) {
  if constexpr (kShort) {
    return Vector::load_bfloat16(short_moment + at);
  } else {
    return Vector::load(moment + at);
  }
}

/// The random bits of both moments of an element are the halves of one hash.
template <bool kShort, bool kSecond>
HYDRA_INLINE void store_moments(const Streams& streams, std::int64_t at, Vector::Float moment1, Vector::Float moment2) {
  if constexpr (kShort) {
    const auto random = Vector::hash(static_cast<std::uint32_t>(at) + streams.seed);
    Vector::store_bfloat16_random(streams.short_moment1 + at, moment1, Vector::lower_half(random));
    if constexpr (kSecond) {
      Vector::store_bfloat16_random(streams.short_moment2 + at, moment2, Vector::upper_half(random));
    }
  } else {
    Vector::store(streams.moment1 + at, moment1);
    if constexpr (kSecond) {
      Vector::store(streams.moment2 + at, moment2);
    }
  }
}

template <bool kDecoupled, bool kSplit, bool kShort>
HYDRA_KERNEL std::int64_t run_adam(const AdamStep& step, const Streams streams, std::int64_t at, std::int64_t end) {
  const auto decay = Vector::broadcast(step.decay);
  const auto rise1 = Vector::broadcast(step.rise1);
  const auto beta2 = Vector::broadcast(step.beta2);
  const auto rise2 = Vector::broadcast(step.rise2);
  const auto step_size = Vector::broadcast(step.step_size);
  const auto inverse_root = Vector::broadcast(step.inverse_root);
  const auto epsilon = Vector::broadcast(step.epsilon);
  for (; at + Vector::kWidth <= end; at += Vector::kWidth) {
    auto weights = load_weights<kSplit>(streams, at);
    auto gradient = load_gradient(streams, at);
    auto moment1 = load_moment<kShort>(streams.moment1, streams.short_moment1, at);
    auto moment2 = load_moment<kShort>(streams.moment2, streams.short_moment2, at);
    if constexpr (kDecoupled) {
      weights = Vector::mul(weights, decay);
    } else {
      gradient = Vector::add(gradient, Vector::mul(weights, decay));
    }
    moment1 = Vector::add(moment1, Vector::mul(Vector::sub(gradient, moment1), rise1));
    moment2 = Vector::add(Vector::mul(moment2, beta2), Vector::mul(Vector::mul(gradient, rise2), gradient));
    const auto divisor = Vector::add(Vector::mul(Vector::sqrt(moment2), inverse_root), epsilon);
    weights = Vector::sub(weights, Vector::div(Vector::mul(step_size, moment1), divisor));
    store_weights<kSplit>(streams, at, weights);
    store_moments<kShort, true>(streams, at, moment1, moment2);
  }
  return at;
}

template <bool kMomentum, bool kSplit, bool kShort>
HYDRA_KERNEL std::int64_t run_sgd(const SgdStep& step, const Streams streams, std::int64_t at, std::int64_t end) {
  const auto learning_rate = Vector::broadcast(step.learning_rate);
  const auto weight_decay = Vector::broadcast(step.weight_decay);
  const auto momentum = Vector::broadcast(step.momentum);
  const auto undamped = Vector::broadcast(step.undamped);
  const bool decays = step.weight_decay != 0.0F;  // 0 times an infinite weight is not 0
  const bool nesterov = step.nesterov;
  for (; at + Vector::kWidth <= end; at += Vector::kWidth) {
    auto weights = load_weights<kSplit>(streams, at);
    auto gradient = load_gradient(streams, at);
    if (decays) {
      gradient = Vector::add(gradient, Vector::mul(weights, weight_decay));
    }
    if constexpr (kMomentum) {
      auto moment = load_moment<kShort>(streams.moment1, streams.short_moment1, at);
      moment = Vector::add(Vector::mul(moment, momentum), Vector::mul(gradient, undamped));
      gradient = nesterov ? Vector::add(gradient, Vector::mul(moment, momentum)) : moment;
      store_moments<kShort, false>(streams, at, moment, moment);
    }
    weights = Vector::sub(weights, Vector::mul(gradient, learning_rate));
    store_weights<kSplit>(streams, at, weights);
  }
  return at;
}

template <bool kSplit, bool kShort>
HYDRA_KERNEL std::int64_t run_rule(const ParameterUpdate& update, std::int64_t begin, std::int64_t end, float scale) {
  const Streams streams = streams_of(update, scale);
  if (const auto* adam = std::get_if<AdamStep>(&update.step)) {
    return adam->decoupled ? run_adam<true, kSplit, kShort>(*adam, streams, begin, end)
                           : run_adam<false, kSplit, kShort>(*adam, streams, begin, end);
  }
  const auto& sgd = *std::get_if<SgdStep>(&update.step);
  return update.first_moment != nullptr ? run_sgd<true, kSplit, kShort>(sgd, streams, begin, end)
                                        : run_sgd<false, kSplit, kShort>(sgd, streams, begin, end);
}

/// Returns the place where it stopped, less than a vector before the end.
HYDRA_KERNEL std::int64_t run_vectors(const ParameterUpdate& update, std::int64_t begin, std::int64_t end,
                                      float scale) {
  const bool short_moments = update.moment_format == NumberFormat::kBfloat16;
  if (update.layout == WeightLayout::kSplit) {
    return short_moments ? run_rule<true, true>(update, begin, end, scale)
                         : run_rule<true, false>(update, begin, end, scale);
  }
  return short_moments ? run_rule<false, true>(update, begin, end, scale)
                       : run_rule<false, false>(update, begin, end, scale);
}
