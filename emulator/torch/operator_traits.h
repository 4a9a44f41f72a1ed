// What the emulator knows of an operator before it is called: from its schema, its tags, and the lists here.
//
// Traits live as long as the process. Thread-safe.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <string>
#include <vector>

namespace emulated_cuda {

/// Stands in for the CPU's kernel of an operator: takes the arguments from the stack, leaves the results there.
using HostKernel = void (*)(torch::jit::Stack& stack, const std::optional<at::Generator>& generator);

struct OperatorTraits {
  std::string name;                  // with the overload
  bool waits_always = false;         // the results' shapes depend on data, or a result is no tensor
  bool random = false;               // draws from a generator
  bool multiplies = false;           // takes the matrix library's workspace
  bool numbers_shape = false;        // no tensor but the written ones: floating-point arguments decide shapes
  int generator = -1;                // the argument that is a generator
  int device = -1;                   // the argument that is a device
  std::vector<bool> written;         // by argument
  std::vector<bool> number;          // by argument: a Scalar, whose type matters and whose value decides no shape
  std::vector<int> returned;         // by result: the argument that it is, or -1
  HostKernel host_kernel = nullptr;  // null: the CPU's
};

const OperatorTraits& traits_of(const c10::OperatorHandle& op);

}  // namespace emulated_cuda
