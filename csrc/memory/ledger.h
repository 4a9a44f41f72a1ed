// The budget of one device: the bytes in use by class, against one limit.
//
// A ledger only counts; it owns no memory and evicts nothing. Code that charges bytes must discharge them from the same
// class, or move them to another class first. Thread-safe and lock-free.
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
  kActivations,  // all other tensors: activations, workspace, inputs
  kBuffers,      // the model's buffers, on the device for the whole context
  kOptimizer,    // optimizer state at home on the device
};
inline constexpr std::size_t kMemoryClasses = 5;

/// The class's name in messages: "weights", "gradients", "activations", "buffers" or "optimizer state".
const char* name(MemoryClass cls) noexcept;

/// The bytes in use at one moment, by class.
struct MemoryUse {
  std::array<Bytes, kMemoryClasses> by_class{};
  /// Activations charged since the last take_activation_peak(): those alive inside one block.
  Bytes workspace = 0;
  Bytes total = 0;
};

class Ledger {
 public:
  static constexpr Bytes kUnlimited = std::numeric_limits<Bytes>::max();

  explicit Ledger(Bytes limit = kUnlimited) noexcept : limit_(limit) {}
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  /// Charges all of `bytes` (>= 0) and returns true, or charges nothing and returns false if the limit would be passed.
  /// Zero bytes always fit.
  [[nodiscard]] bool try_charge(MemoryClass cls, Bytes bytes) noexcept;
  void discharge(MemoryClass cls, Bytes bytes) noexcept;
  /// Moves charged bytes to another class; the total does not change.
  void move(MemoryClass from, MemoryClass to, Bytes bytes) noexcept;

  Bytes limit() const noexcept { return limit_.load(std::memory_order_relaxed); }
  /// Sets the limit. A limit below the bytes in use refuses new charges and evicts nothing.
  void set_limit(Bytes limit) noexcept { limit_.store(limit, std::memory_order_relaxed); }
  Bytes in_use() const noexcept { return total_.load(std::memory_order_relaxed); }
  Bytes in_use(MemoryClass cls) const noexcept;
  /// The highest total since construction or reset_peak().
  Bytes peak() const noexcept { return peak_.load(std::memory_order_relaxed); }
  /// The use by class at the highest total. Exact with one charging thread. With several, the classes may
  /// be read a moment after the total.
  MemoryUse at_peak() const noexcept;
  void reset_peak() noexcept;
  /// Returns the highest total since the last call, and starts again at the bytes in use now. Does not change the other
  /// peaks.
  Bytes take_peak() noexcept;

  /// Returns the highest total of activations and buffers since the last call, and starts again at the
  /// bytes in use now. Slots have to leave this much room free.
  Bytes take_activation_peak() noexcept;

 private:
  void note_peak(Bytes total) noexcept;
  Bytes activations_now() const noexcept;

  std::atomic<Bytes> limit_;
  std::atomic<Bytes> total_{0};
  std::atomic<Bytes> peak_{0};
  std::atomic<Bytes> taken_peak_{0};  // for take_peak()
  std::atomic<Bytes> activation_peak_{0};
  std::array<std::atomic<Bytes>, kMemoryClasses> by_class_{};
  std::array<std::atomic<Bytes>, kMemoryClasses> class_at_peak_{};
  std::atomic<Bytes> boundary_{0};  // activations at the last take_activation_peak()
  std::atomic<Bytes> boundary_at_peak_{0};
};

}  // namespace hydra
