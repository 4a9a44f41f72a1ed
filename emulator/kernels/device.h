// The words of CUDA C++ that a translated source finds: what `#include` of nvcc's own headers gives on a GPU.
//
// translate.py includes this file first. Qualifiers such as __global__ come from CUDA's headers, where they are empty
// for a host compiler. Each barrier and warp operation knows the place where it stands. A warp operation needs all
// lanes of its mask at the same place; only __syncwarp and __syncthreads order memory, as on a GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <bit>
#include <cstdint>
#include <source_location>
#include <type_traits>

#include "emulator/kernels/executor.h"

namespace emulated_cuda::kernels {

/// Becomes a reference to the variable of this key in the calling thread's block.
class SharedVariable {
 public:
  explicit SharedVariable(const void* key) noexcept : key_(key) {}
  template <class Variable>
  operator Variable&() const {
    static_assert(std::is_trivially_default_constructible_v<Variable>, "shared variables have no constructor");
    return *static_cast<Variable*>(shared_variable(key_, sizeof(Variable), alignof(Variable)));
  }

 private:
  const void* key_;
};

/// The result of every lane is a bit for each lane of the mask.
inline void combine_votes(const Offers& offers, LaneMask mask, Results& results) {
  LaneMask votes = 0;
  for (unsigned lane = 0; lane < kWarpLanes; ++lane) {
    votes |= static_cast<LaneMask>((mask >> lane & 1U) != 0 && offers[lane].value != 0) << lane;
  }
  results.fill(votes);
}

/// The result of every lane is `Reduction` of the mask's values, taken two at a time.
template <class Value, class Reduction>
void combine_values(const Offers& offers, LaneMask mask, Results& results) {
  auto total = static_cast<Value>(offers[static_cast<unsigned>(std::countr_zero(mask))].value);
  for (LaneMask left = mask & (mask - 1); left != 0; left &= left - 1) {
    total = Reduction{}(total, static_cast<Value>(offers[static_cast<unsigned>(std::countr_zero(left))].value));
  }
  results.fill(static_cast<std::uint64_t>(total));
}

/// A lane gets the value of the lane `argument` above it. Where there is none, it keeps its own; where that lane is not
/// in the mask, it gets bits that are certainly wrong.
inline void combine_shifted(const Offers& offers, LaneMask mask, Results& results) {
  for (unsigned lane = 0; lane < kWarpLanes; ++lane) {
    const std::uint64_t from = std::uint64_t{lane} + offers[lane].argument;
    const bool own = from >= kWarpLanes;
    results[lane] = own ? offers[lane].value : (mask >> from & 1U) != 0 ? offers[from].value : ~offers[lane].value;
  }
}

struct Sum {
  // Unsigned, because an overflow wraps.
  int operator()(int a, int b) const noexcept {
    return static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b));
  }
  unsigned operator()(unsigned a, unsigned b) const noexcept { return a + b; }
};
struct Least {
  template <class Value>
  Value operator()(Value a, Value b) const noexcept {
    return b < a ? b : a;
  }
};
struct Greatest {
  template <class Value>
  Value operator()(Value a, Value b) const noexcept {
    return a < b ? b : a;
  }
};

template <class Reduction, class Value>
Value reduced(const char* name, unsigned mask, Value value, const std::source_location& where) {
  const Operation operation{.name = name, .where = where, .mask = mask, .combine = &combine_values<Value, Reduction>};
  return static_cast<Value>(meet_in_warp(operation, {.value = static_cast<std::uint64_t>(value)}));
}

/// The types that a warp reduces.
template <class Value>
concept Reducible = std::is_same_v<Value, int> || std::is_same_v<Value, unsigned>;

}  // namespace emulated_cuda::kernels

// ---- barriers -------------------------------------------------------------------------------------------------------

inline void __syncthreads(std::source_location where = std::source_location::current()) {
  emulated_cuda::kernels::meet_in_block({.name = "__syncthreads", .where = where, .orders_memory = true});
}

inline void __syncwarp(unsigned mask = 0xFFFFFFFFU, std::source_location where = std::source_location::current()) {
  emulated_cuda::kernels::meet_in_warp({.name = "__syncwarp", .where = where, .mask = mask, .orders_memory = true}, {});
}

// ---- a warp's votes, sums and shifts --------------------------------------------------------------------------------

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              std::source_location where = std::source_location::current()) {
  return static_cast<unsigned>(emulated_cuda::kernels::meet_in_warp(
      {.name = "__ballot_sync", .where = where, .mask = mask, .combine = &emulated_cuda::kernels::combine_votes},
      {.value = predicate != 0}));
}

template <emulated_cuda::kernels::Reducible Value>
Value __reduce_add_sync(unsigned mask, Value value, std::source_location where = std::source_location::current()) {
  return emulated_cuda::kernels::reduced<emulated_cuda::kernels::Sum>("__reduce_add_sync", mask, value, where);
}

template <emulated_cuda::kernels::Reducible Value>
Value __reduce_min_sync(unsigned mask, Value value, std::source_location where = std::source_location::current()) {
  return emulated_cuda::kernels::reduced<emulated_cuda::kernels::Least>("__reduce_min_sync", mask, value, where);
}

template <emulated_cuda::kernels::Reducible Value>
Value __reduce_max_sync(unsigned mask, Value value, std::source_location where = std::source_location::current()) {
  return emulated_cuda::kernels::reduced<emulated_cuda::kernels::Greatest>("__reduce_max_sync", mask, value, where);
}

/// Of whole warps: the width is 32.
template <class Value>
  requires(std::is_arithmetic_v<Value> && (sizeof(Value) == 4 || sizeof(Value) == 8))
Value __shfl_down_sync(unsigned mask, Value value, unsigned delta,
                       std::source_location where = std::source_location::current()) {
  using Bits = std::conditional_t<sizeof(Value) == 4, std::uint32_t, std::uint64_t>;
  const std::uint64_t bits = emulated_cuda::kernels::meet_in_warp(
      {.name = "__shfl_down_sync", .where = where, .mask = mask, .combine = &emulated_cuda::kernels::combine_shifted},
      {.value = std::bit_cast<Bits>(value), .argument = delta});
  return std::bit_cast<Value>(static_cast<Bits>(bits));
}

// ---- atomic operations: each returns the value before, and orders nothing else --------------------------------------

template <class Value>
Value atomicAdd(Value* address, std::type_identity_t<Value> value) {
  return std::atomic_ref(*address).fetch_add(value, std::memory_order_relaxed);
}

template <class Value>
Value atomicOr(Value* address, std::type_identity_t<Value> value) {
  return std::atomic_ref(*address).fetch_or(value, std::memory_order_relaxed);
}

template <class Value>
Value atomicExch(Value* address, std::type_identity_t<Value> value) {
  return std::atomic_ref(*address).exchange(value, std::memory_order_relaxed);
}

// ---- functions that need no header in device code -------------------------------------------------------------------

template <class Value>
  requires std::is_integral_v<Value>
constexpr Value min(Value a, Value b) noexcept {
  return b < a ? b : a;
}
