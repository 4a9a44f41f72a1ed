#include "csrc/pytorch/parameters/tensor_plan.h"

#include <ATen/MemoryOverlap.h>

#include <array>
#include <utility>

#include "csrc/base/errors.h"
#include "csrc/pytorch/memory/number_format.h"
#include "csrc/pytorch/model/paged_model.h"

namespace hydra {

namespace {

NumberFormat format_of(const at::Tensor& tensor) {
  const std::optional<NumberFormat> format = number_format(tensor.scalar_type());
  HYDRA_EXPECT(format.has_value(), StateError,
               std::string("a tensor has the type ") + at::toString(tensor.scalar_type()) +
                   "; the native loops support float32, bfloat16 and float16");
  return *format;
}

void expect_dense(const at::Tensor& tensor) {
  HYDRA_EXPECT(tensor.device().is_cpu() && tensor.layout() == at::kStrided && tensor.is_non_overlapping_and_dense(),
               StateError, "a tensor is not dense host memory");
}

void expect_like(const at::Tensor& weights, const at::Tensor& tensor) {
  expect_dense(tensor);
  HYDRA_EXPECT(tensor.sizes() == weights.sizes() && tensor.strides() == weights.strides(), StateError,
               "a tensor has other sizes or strides than the weights");
}

void expect_replaceable(const at::Tensor& weights, const at::Tensor& new_weights) {
  HYDRA_EXPECT(new_weights.scalar_type() == weights.scalar_type(), StateError,
               "the new weights have another type than the weights");
  HYDRA_EXPECT(at::get_overlap_status(weights, new_weights) == at::MemOverlapStatus::No, StateError,
               "the new weights share memory with the weights; leave them out to write in place");
}

/// The update without its addresses.
ParameterUpdate formats_of(const TensorUpdate& update) {
  ParameterUpdate plain{.step = update.step};
  plain.count = update.weights.numel();
  plain.weight_format = format_of(update.weights);
  plain.gradient_format = format_of(update.gradient);
  if (update.master) {
    const bool split = update.master->scalar_type() == at::kShort;
    HYDRA_EXPECT(split || update.master->scalar_type() == at::kFloat, StateError,
                 "the master is neither float32 nor int16");
    plain.layout = split ? WeightLayout::kSplit : WeightLayout::kMaster;
  }
  if (update.first_moment) {
    plain.moment_format = format_of(*update.first_moment);
    HYDRA_EXPECT(!update.second_moment || format_of(*update.second_moment) == plain.moment_format, StateError,
                 "the two moments have different types");
  }
  plain.seed = update.seed;
  return plain;
}

void bring_to_host(const at::Tensor& tensor) {
  if (const WithheldPtr withheld = withheld_of(tensor)) {
    if (const std::shared_ptr<PagedModel> model = withheld->owner.lock()) {
      model->moves().bring_home(withheld->block, tensor.storage());
    }
  }
}

/// Fills in the addresses. Returns false if a tensor has none.
bool add_addresses(ParameterUpdate& plain, const TensorUpdate& update, const TensorPlan::AddressOf& address_of) {
  bool all = true;
  const auto found = [&](const OptionalTensor& tensor) -> void* {
    if (!tensor) {
      return nullptr;
    }
    void* const address = address_of(*tensor);
    all = all && (address != nullptr || tensor->numel() == 0);
    return address;
  };
  plain.weights = found(update.weights);
  plain.new_weights = found(update.new_weights);
  plain.gradient = found(update.gradient);
  plain.master = found(update.master);
  plain.first_moment = found(update.first_moment);
  plain.second_moment = found(update.second_moment);
  return all;
}

}  // namespace

void TensorPlan::add(TensorUpdate update) {
  expect_dense(update.weights);
  for (const OptionalTensor& tensor : {OptionalTensor(update.gradient), update.new_weights, update.master,
                                       update.first_moment, update.second_moment}) {
    if (tensor) {
      expect_like(update.weights, *tensor);
    }
  }
  if (update.new_weights) {
    expect_replaceable(update.weights, *update.new_weights);
  }
  // Reports missing tensors now, before their addresses are known.
  ParameterUpdate plain = formats_of(update);
  add_addresses(plain, update, [](const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl(); });
  StepPlan(instructions_).add(plain);
  updates_.push_back(std::move(update));
}

std::optional<StepPlan> TensorPlan::at(const AddressOf& address_of) const {
  StepPlan plan(instructions_);
  for (const TensorUpdate& update : updates_) {
    ParameterUpdate plain = formats_of(update);
    if (!add_addresses(plain, update, address_of)) {
      return std::nullopt;
    }
    plan.add(plain);
  }
  return plan;
}

StepPlan TensorPlan::on_host() const {
  return *at([](const at::Tensor& tensor) {
    bring_to_host(tensor);  // leaves tensors on the host alone
    return tensor.mutable_data_ptr();
  });
}

NormInput norm_input(const at::Tensor& tensor, const void* data) {
  expect_dense(tensor);
  return {.data = data, .format = format_of(tensor), .count = tensor.numel()};
}

std::vector<double> tensor_sums(const std::vector<at::Tensor>& tensors, ThreadPool& pool, InstructionSet instructions) {
  std::vector<std::optional<double>> sums(tensors.size());
  std::map<std::shared_ptr<PagedModel>, std::vector<std::size_t>> elsewhere;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const WithheldPtr withheld = withheld_of(tensors[i]);
    if (const auto model = withheld ? withheld->owner.lock() : nullptr) {
      elsewhere[model].push_back(i);
    }
  }
  for (const auto& [model, places] : elsewhere) {
    std::vector<at::Tensor> there;
    for (const std::size_t place : places) {
      there.push_back(tensors[place]);
    }
    const auto found = model->homes().device().sums_of_squares(there, pool);
    for (std::size_t i = 0; i < places.size(); ++i) {
      sums[places[i]] = found[i];
      if (found[i]) {
        continue;
      }
      if (const at::Tensor copy = model->moves().read_from_disk(there[i]); copy.defined()) {
        double sum = 0.0;
        const NormInput input = norm_input(copy, copy.const_data_ptr());
        sums_of_squares({&input, 1}, {&sum, 1}, pool, instructions);
        sums[places[i]] = sum;
      } else {
        bring_to_host(there[i]);
      }
    }
  }
  std::vector<NormInput> on_host;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!sums[i]) {
      on_host.push_back(norm_input(tensors[i], tensors[i].const_data_ptr()));
    }
  }
  std::vector<double> found(on_host.size());
  sums_of_squares(on_host, found, pool, instructions);
  std::vector<double> all;
  auto next = found.begin();
  for (const std::optional<double>& sum : sums) {
    all.push_back(sum ? *sum : *next++);
  }
  return all;
}

}  // namespace hydra
