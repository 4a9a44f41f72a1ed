#include "csrc/memory/ledger.h"

#include <algorithm>

namespace hydra {
namespace {

// Counters guard no other memory, so they need no order between them.
constexpr auto kRelaxed = std::memory_order_relaxed;

constexpr std::size_t index(MemoryClass cls) noexcept { return static_cast<std::size_t>(cls); }

/// Raises the maximum to `value`. Returns whether `value` is a new maximum.
bool raise(std::atomic<Bytes>& maximum, Bytes value) noexcept {
  Bytes seen = maximum.load(kRelaxed);
  while (value > seen) {
    if (maximum.compare_exchange_weak(seen, value, kRelaxed)) {
      return true;
    }
  }
  return false;
}

bool counts_as_activation(MemoryClass cls) noexcept {
  return cls == MemoryClass::kActivations || cls == MemoryClass::kBuffers;
}

}  // namespace

const char* name(MemoryClass cls) noexcept {
  constexpr std::array<const char*, kMemoryClasses> kNames = {"weights", "gradients", "activations", "buffers",
                                                              "optimizer state"};
  return kNames[index(cls)];
}

bool Ledger::try_charge(MemoryClass cls, Bytes bytes) noexcept {
  if (bytes == 0) {
    return true;
  }
  Bytes total = total_.load(kRelaxed);
  do {
    // The subtraction overflows neither in an unlimited ledger nor with a limit below the use.
    if (bytes > limit() - total) {
      return false;
    }
  } while (!total_.compare_exchange_weak(total, total + bytes, kRelaxed));
  by_class_[index(cls)].fetch_add(bytes, kRelaxed);
  note_peak(total + bytes);
  if (counts_as_activation(cls)) {
    raise(activation_peak_, activations_now());
  }
  return true;
}

void Ledger::discharge(MemoryClass cls, Bytes bytes) noexcept {
  by_class_[index(cls)].fetch_sub(bytes, kRelaxed);
  total_.fetch_sub(bytes, kRelaxed);
}

void Ledger::move(MemoryClass from, MemoryClass to, Bytes bytes) noexcept {
  by_class_[index(from)].fetch_sub(bytes, kRelaxed);
  by_class_[index(to)].fetch_add(bytes, kRelaxed);
  if (counts_as_activation(to)) {
    raise(activation_peak_, activations_now());
  }
}

Bytes Ledger::in_use(MemoryClass cls) const noexcept { return by_class_[index(cls)].load(kRelaxed); }

MemoryUse Ledger::at_peak() const noexcept {
  MemoryUse use;
  for (std::size_t i = 0; i < kMemoryClasses; ++i) {
    use.by_class[i] = class_at_peak_[i].load(kRelaxed);
  }
  const Bytes activations = use.by_class[index(MemoryClass::kActivations)];
  use.workspace = std::max<Bytes>(activations - boundary_at_peak_.load(kRelaxed), 0);
  use.total = peak();
  return use;
}

void Ledger::reset_peak() noexcept {
  for (std::size_t i = 0; i < kMemoryClasses; ++i) {
    class_at_peak_[i].store(by_class_[i].load(kRelaxed), kRelaxed);
  }
  boundary_at_peak_.store(boundary_.load(kRelaxed), kRelaxed);
  peak_.store(in_use(), kRelaxed);
}

Bytes Ledger::take_activation_peak() noexcept {
  const Bytes now = activations_now();
  boundary_.store(in_use(MemoryClass::kActivations), kRelaxed);
  return std::max(now, activation_peak_.exchange(now, kRelaxed));
}

Bytes Ledger::take_peak() noexcept {
  const Bytes now = in_use();
  return std::max(now, taken_peak_.exchange(now, kRelaxed));
}

void Ledger::note_peak(Bytes total) noexcept {
  raise(taken_peak_, total);
  if (!raise(peak_, total)) {
    return;
  }
  for (std::size_t i = 0; i < kMemoryClasses; ++i) {
    class_at_peak_[i].store(by_class_[i].load(kRelaxed), kRelaxed);
  }
  boundary_at_peak_.store(boundary_.load(kRelaxed), kRelaxed);
}

Bytes Ledger::activations_now() const noexcept {
  return in_use(MemoryClass::kActivations) + in_use(MemoryClass::kBuffers);
}

}  // namespace hydra
