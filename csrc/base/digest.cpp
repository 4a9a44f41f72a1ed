#include "csrc/base/digest.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace hydra {
namespace {

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87ULL;
constexpr std::uint64_t kPrime2 = 0xC2B2AE3D27D4EB4FULL;
constexpr std::uint64_t kPrime3 = 0x165667B19E3779F9ULL;
constexpr std::uint64_t kPrime4 = 0x85EBCA77C2B2AE63ULL;
constexpr std::uint64_t kPrime5 = 0x27D4EB2F165667C5ULL;

template <class Word>
std::uint64_t word_at(const std::uint8_t* data) noexcept {
  Word word = 0;
  std::memcpy(&word, data, sizeof word);
  return word;
}

std::uint64_t round_of(std::uint64_t lane, std::uint64_t word) noexcept {
  return std::rotl(lane + word * kPrime2, 31) * kPrime1;
}

const std::uint8_t* add_stripes(std::array<std::uint64_t, 4>& lanes, const std::uint8_t* data,
                                const std::uint8_t* end) noexcept {
  std::array<std::uint64_t, 4> local = lanes;
  for (; end - data >= 32; data += 32) {
    local[0] = round_of(local[0], word_at<std::uint64_t>(data));
    local[1] = round_of(local[1], word_at<std::uint64_t>(data + 8));
    local[2] = round_of(local[2], word_at<std::uint64_t>(data + 16));
    local[3] = round_of(local[3], word_at<std::uint64_t>(data + 24));
  }
  lanes = local;
  return data;
}

}  // namespace

Digest::Digest() noexcept : lanes_{kPrime1 + kPrime2, kPrime2, 0, 0 - kPrime1} {}

void Digest::add(const void* data, Bytes bytes) noexcept {
  const auto* next = static_cast<const std::uint8_t*>(data);
  const auto* const end = next + bytes;
  const std::size_t held = bytes_ % kStripe;
  bytes_ += static_cast<std::uint64_t>(bytes);
  if (held > 0) {
    const std::size_t taken = std::min(kStripe - held, static_cast<std::size_t>(end - next));
    std::copy_n(next, taken, rest_.data() + held);
    next += taken;
    if (held + taken < kStripe) {
      return;
    }
    add_stripes(lanes_, rest_.data(), rest_.data() + kStripe);
  }
  next = add_stripes(lanes_, next, end);
  std::copy(next, end, rest_.data());
}

std::uint64_t Digest::value() const noexcept {
  std::uint64_t sum = kPrime5;
  if (bytes_ >= kStripe) {
    sum = std::rotl(lanes_[0], 1) + std::rotl(lanes_[1], 7) + std::rotl(lanes_[2], 12) + std::rotl(lanes_[3], 18);
    for (const std::uint64_t lane : lanes_) {
      sum = (sum ^ round_of(0, lane)) * kPrime1 + kPrime4;
    }
  }
  sum += bytes_;
  const std::uint8_t* next = rest_.data();
  const std::uint8_t* const end = next + bytes_ % kStripe;
  for (; end - next >= 8; next += 8) {
    sum = std::rotl(sum ^ round_of(0, word_at<std::uint64_t>(next)), 27) * kPrime1 + kPrime4;
  }
  for (; end - next >= 4; next += 4) {
    sum = std::rotl(sum ^ (word_at<std::uint32_t>(next) * kPrime1), 23) * kPrime2 + kPrime3;
  }
  for (; next != end; ++next) {
    sum = std::rotl(sum ^ (*next * kPrime5), 11) * kPrime1;
  }
  sum = (sum ^ (sum >> 33)) * kPrime2;
  sum = (sum ^ (sum >> 29)) * kPrime3;
  return sum ^ (sum >> 32);
}

}  // namespace hydra
