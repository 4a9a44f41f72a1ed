#include "emulator/torch/invocation.h"

#include <ATen/EmptyTensor.h>

#include <cstring>
#include <iterator>
#include <utility>

namespace emulated_cuda {

std::vector<at::Tensor> tensors_of(const c10::IValue& result) {
  if (result.isTensor()) {
    return {result.toTensor()};
  }
  return result.isTensorList() ? result.toTensorVector() : std::vector<at::Tensor>{};
}

void copy_bytes(void* to, const at::Tensor& from) {
  if (from.numel() > 0) {
    std::memcpy(to, from.const_data_ptr(),
                at::detail::computeStorageNbytes(from.sizes(), from.strides(), from.itemsize()));
  }
}

c10::IValue Invocation::argument(const Slot& slot) const {
  const auto tensor = [&](int number) {
    return number == Operands::kUndefined ? at::Tensor() : opened_[static_cast<std::size_t>(number)];
  };
  switch (slot.kind) {
    case Slot::Kind::kTensor:
      return tensor(slot.operands.front());
    case Slot::Kind::kTensors: {
      c10::List<at::Tensor> list;
      for (const int number : slot.operands) {
        list.push_back(tensor(number));
      }
      return list;
    }
    case Slot::Kind::kOptionalTensors: {
      c10::List<std::optional<at::Tensor>> list;
      for (const int number : slot.operands) {
        list.push_back(number == Operands::kUndefined ? std::nullopt : std::optional(tensor(number)));
      }
      return list;
    }
    case Slot::Kind::kValue:
      break;
  }
  return slot.value;
}

void Invocation::run() {
  opened_ = operands.open();
  std::optional<at::Generator> generator;
  if (draw) {
    generator = host_generator(*draw);
  }
  torch::jit::Stack stack;
  stack.reserve(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (generator && static_cast<int>(i) == traits_.generator) {
      stack.emplace_back(*generator);
    } else {
      stack.push_back(argument(slots[i]));
    }
  }
  if (traits_.host_kernel != nullptr) {
    traits_.host_kernel(stack, generator);
  } else {
    op_.callBoxed(stack);
  }
  results_ = std::move(stack);
}

void Invocation::run_on_meta() {
  opened_ = operands.open_on_meta();
  torch::jit::Stack stack;
  stack.reserve(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const bool is_device = static_cast<int>(i) == traits_.device && slots[i].value.isDevice();
    stack.push_back(is_device ? c10::IValue(c10::Device(c10::kMeta)) : argument(slots[i]));
  }
  op_.callBoxed(stack);
  results_ = std::move(stack);
}

void Invocation::run_into(const CallShapes& shapes, const std::vector<void*>& outputs) {
  run();
  check_sizes(shapes);
  auto output = outputs.begin();
  for (std::size_t i = 0; i < shapes.results.size(); ++i) {
    const auto& expected = shapes.results[i].tensors;
    if (expected.empty()) {
      continue;
    }
    const std::vector<at::Tensor> found = tensors_of(results_[i]);
    TORCH_CHECK(found.size() == expected.size(), traits_.name, ": another number of tensors than before");
    for (std::size_t j = 0; j < expected.size(); ++j) {
      TORCH_CHECK(expected[j].fits(found[j]), traits_.name, ": a result of another shape than before");
      if (expected[j].kind == TensorShape::Kind::kNew) {
        copy_bytes(*output++, found[j]);
      }
    }
  }
}

/// The host has resized the written operands as they were resized before, so nothing was to be resized now.
void Invocation::check_sizes(const CallShapes& shapes) const {
  for (const Resized& resized : shapes.resized) {
    TORCH_CHECK(resized.shape.fits(opened_[static_cast<std::size_t>(resized.operand)]), traits_.name,
                ": gave a tensor another size than before");
  }
  for (std::size_t i = 0; i < opened_.size(); ++i) {
    const auto number = static_cast<int>(i);
    TORCH_CHECK(operands.on_host(number) || opened_[i].storage().data() == operands.data(number), traits_.name,
                ": made a tensor larger than before");
  }
}

}  // namespace emulated_cuda
