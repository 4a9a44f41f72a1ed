#include "csrc/pytorch/native_steps.h"

#include <map>

#include "csrc/base/errors.h"
#include "csrc/optim/norm.h"
#include "csrc/pytorch/number_format.h"
#include "csrc/pytorch/paged_model.h"

namespace hydra {

namespace {

NumberFormat format_of(const at::Tensor& tensor) {
  const std::optional<NumberFormat> format = number_format(tensor.scalar_type());
  HYDRA_EXPECT(format.has_value(), StateError,
               std::string("numbers of type ") + at::toString(tensor.scalar_type()) +
                   "; float32, bfloat16 and float16 can be worked with");
  return *format;
}

void expect_dense(const at::Tensor& tensor) {
  HYDRA_EXPECT(tensor.device().is_cpu() && tensor.layout() == at::kStrided && tensor.is_non_overlapping_and_dense(),
               StateError, "a tensor that is not dense memory of the host");
}

/// The tensor's bytes, on the device if that is their home.
void* memory_of(const at::Tensor& tensor) {
  void* const home = home_data(tensor);
  return home != nullptr ? home : tensor.data_ptr();
}

/// The arithmetic of the device that is the tensor's home, if its memory is not the host's.
DeviceMath* math_at_home(const at::Tensor& tensor) {
  const Withheld* const withheld = home_data(tensor) != nullptr ? withheld_of(tensor) : nullptr;
  const std::shared_ptr<PagedModel> model = withheld != nullptr ? withheld->owner.lock() : nullptr;
  return model ? model->homes().math() : nullptr;
}

/// The memory of a tensor that lies exactly as the weights do; null for none.
void* memory_like(const at::Tensor& weights, const OptionalTensor& tensor) {
  if (!tensor) {
    return nullptr;
  }
  expect_dense(*tensor);
  HYDRA_EXPECT(tensor->sizes() == weights.sizes() && tensor->strides() == weights.strides(), StateError,
               "a tensor that does not lie in memory as the weights do");
  return memory_of(*tensor);
}

}  // namespace

void add_update(StepPlan& plan, const std::variant<AdamStep, SgdStep>& step, const at::Tensor& weights,
                const at::Tensor& gradient, const OptionalTensor& master, const OptionalTensor& first_moment,
                const OptionalTensor& second_moment, std::uint32_t seed) {
  ParameterUpdate update{.step = step};
  expect_dense(weights);
  update.count = weights.numel();
  update.weight_format = format_of(weights);
  update.gradient_format = format_of(gradient);
  update.weights = memory_of(weights);
  update.gradient = memory_like(weights, gradient);
  update.master = memory_like(weights, master);
  update.first_moment = memory_like(weights, first_moment);
  update.second_moment = memory_like(weights, second_moment);
  if (master) {
    const bool split = master->scalar_type() == at::kShort;
    HYDRA_EXPECT(split || master->scalar_type() == at::kFloat, StateError, "a master neither float32 nor int16");
    update.layout = split ? WeightLayout::kSplit : WeightLayout::kMaster;
  }
  if (first_moment) {
    update.moment_format = format_of(*first_moment);
    HYDRA_EXPECT(!second_moment || format_of(*second_moment) == update.moment_format, StateError,
                 "two moments of different types");
  }
  update.seed = seed;
  plan.add(update);
}

std::vector<double> tensor_sums(const std::vector<at::Tensor>& tensors, ThreadPool& pool, InstructionSet instructions) {
  std::map<DeviceMath*, std::vector<std::size_t>> places;  // null: the host, and devices that are host memory
  std::vector<NormInput> inputs;
  for (const at::Tensor& tensor : tensors) {
    expect_dense(tensor);
    places[math_at_home(tensor)].push_back(inputs.size());
    inputs.push_back({.data = memory_of(tensor), .format = format_of(tensor), .count = tensor.numel()});
  }
  std::vector<double> sums(tensors.size());
  for (const auto& [math, members] : places) {
    std::vector<NormInput> there;
    for (const std::size_t member : members) {
      there.push_back(inputs[member]);
    }
    std::vector<double> found(members.size());
    math != nullptr ? math->sums_of_squares(there, found) : sums_of_squares(there, found, pool, instructions);
    for (std::size_t i = 0; i < members.size(); ++i) {
      sums[members[i]] = found[i];
    }
  }
  return sums;
}

}  // namespace hydra
