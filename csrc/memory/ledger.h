// The budget of one device: bytes in use by class, against one limit.
//
// Thread-safe and lock-free. A ledger counts; it owns no memory and evicts nothing. Code that charges
// must discharge the same bytes to the same class, or move them to another class first.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <limits>

#include "csrc/base/types.h"

namespace hydra {

enum class MemoryClass : std::uint8_t {
  kWeights,      // slots, and copies derived from weights
  kGradients,    // gradients on their way to the host, or at home on the device
  kActivations,  // whatever else tensors hold: activations, workspace, inputs
  kBuffers,      // the model's buffers, home on the device for the whole context
  kOptimizer,    // optimizer state at home on the device
};
inline constexpr std::size_t kMemoryClasses = 5;

/// "weights", "gradients", "activations", "buffers", "optimizer state": for messages.
const char* name(MemoryClass cls) noexcept;

/// Bytes per class at one moment.
struct MemoryUse {
  std::array<Bytes, kMemoryClasses> by_class{};
  /// The part of the activations that came since the last take_activation_peak(): what is alive inside one block.
  Bytes workspace = 0;
  Bytes total = 0;
};

class Ledger {
 public:
  static constexpr Bytes kUnlimited = std::numeric_limits<Bytes>::max();

  explicit Ledger(Bytes limit = kUnlimited) noexcept : limit_(limit) {}
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  /// Charges all of `bytes` (>= 0) or nothing. False when the limit would be passed; nothing always fits.
  [[nodiscard]] bool try_charge(MemoryClass cls, Bytes bytes) noexcept;
  void discharge(MemoryClass cls, Bytes bytes) noexcept;
  /// Re-labels bytes that are charged already; the total does not change.
  void move(MemoryClass from, MemoryClass to, Bytes bytes) noexcept;

  Bytes limit() const noexcept { return limit_.load(std::memory_order_relaxed); }
  /// A lower limit than what is in use refuses new charges and takes nothing back.
  void set_limit(Bytes limit) noexcept { limit_.store(limit, std::memory_order_relaxed); }
  Bytes in_use() const noexcept { return total_.load(std::memory_order_relaxed); }
  Bytes in_use(MemoryClass cls) const noexcept;
  /// Highest total since construction or reset_peak().
  Bytes peak() const noexcept { return peak_.load(std::memory_order_relaxed); }
  /// Use by class as read when the highest total was reached. Exact with one charging thread; with
  /// several, the classes may be read a moment apart from the total.
  MemoryUse at_peak() const noexcept;
  void reset_peak() noexcept;
  /// Highest total since the last call; starts again at what is in use now. The others do not notice.
  Bytes take_peak() noexcept;

  /// Highest total of activations and buffers since the last call; starts again at the
  /// bytes in use now. This is the room that slots have to leave free.
  Bytes take_activation_peak() noexcept;

 private:
  void note_peak(Bytes total) noexcept;
  Bytes activations_now() const noexcept;

  std::atomic<Bytes> limit_;
  std::atomic<Bytes> total_{0};
  std::atomic<Bytes> peak_{0};
  std::atomic<Bytes> taken_peak_{0};  // of take_peak()
  std::atomic<Bytes> activation_peak_{0};
  std::array<std::atomic<Bytes>, kMemoryClasses> by_class_{};
  std::array<std::atomic<Bytes>, kMemoryClasses> class_at_peak_{};
  std::atomic<Bytes> boundary_{0};  // activations at the last take_activation_peak()
  std::atomic<Bytes> boundary_at_peak_{0};
};

}  // namespace hydra
