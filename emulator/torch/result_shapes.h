// The sizes, strides and types of an operator's results, and the memory of those seen, by a key made of the operator
// and of what decides them.
//
// The memory lives as long as the process, and grows by one entry for each operator and shapes of its arguments.
// Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "emulator/cudart/control.h"

namespace emulated_cuda {

/// One tensor.
struct TensorShape {
  enum class Kind { kUndefined, kNew, kAlias };
  Kind kind = Kind::kUndefined;
  int operand = -1;  // kAlias: the result lies in this operand's storage
  at::DimVector sizes;
  at::DimVector strides;
  std::int64_t offset = 0;  // kAlias only
  at::ScalarType dtype = at::kFloat;

  static TensorShape of(const at::Tensor& tensor, Kind kind);
  bool fits(const at::Tensor& tensor) const;
};

/// One result: a tensor, or a list of them, or, under the virtual clock, a number.
struct ResultShape {
  bool list = false;
  c10::IValue number;  // none: a tensor or tensors
  std::vector<TensorShape> tensors;
};

/// A written operand that an operator gave another size.
struct Resized {
  int operand = -1;
  TensorShape shape;
};

struct CallShapes {
  std::vector<ResultShape> results;
  std::vector<Resized> resized;
  KernelWork work;       // under the virtual clock
  bool launches = true;  // false: the results are views, and nothing is written
};

std::shared_ptr<const CallShapes> find_shapes(const std::string& key);
void remember_shapes(const std::string& key, CallShapes shapes);
/// How many calls ran behind the host since the process began, and how many were waited for.
struct CallCounts {
  std::int64_t behind = 0;
  std::int64_t waited = 0;
};
CallCounts call_counts() noexcept;
void count_call(bool waited) noexcept;

}  // namespace emulated_cuda
