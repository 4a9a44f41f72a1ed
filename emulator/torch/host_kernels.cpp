#include "emulator/torch/host_kernels.h"

#include <ATen/ATen.h>

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

namespace emulated_cuda {

namespace {

using at::Tensor;
using torch::jit::Stack;
using Generator = std::optional<at::Generator>;

Tensor plus(const Tensor& gates, const Tensor& bias) { return bias.defined() ? gates + bias : gates; }

/// Undefined stands for zeros.
Tensor zeros_unless(const Tensor& gradient, const Tensor& like) {
  return gradient.defined() ? gradient : at::zeros_like(like);
}

// ---- dropout --------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> dropout(const Tensor& input, double probability, bool training, const Generator& generator) {
  if (!training || probability == 0.0) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  Tensor kept = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1.0 - probability, generator);
  const double scale = probability == 1.0 ? 0.0 : 1.0 / (1.0 - probability);
  return {input.mul(kept).mul_(scale), kept};
}

void native_dropout(Stack& stack, const Generator& generator) {
  const bool training = torch::jit::pop(stack).toOptional<bool>().value_or(true);
  const double probability = torch::jit::pop(stack).toDouble();
  const Tensor input = torch::jit::pop(stack).toTensor();
  auto [output, kept] = dropout(input, probability, training, generator);
  torch::jit::push(stack, std::move(output), std::move(kept));
}

void fused_dropout(Stack& stack, const Generator& generator) {
  torch::jit::drop(stack, 1);  // the generator: this is it
  const double keep = torch::jit::pop(stack).toDouble();
  const Tensor input = torch::jit::pop(stack).toTensor();
  auto [output, kept] = dropout(input, 1.0 - keep, true, generator);
  torch::jit::push(stack, std::move(output), kept.to(at::kByte));
}

void masked_scale(Stack& stack, const Generator&) {
  const double scale = torch::jit::pop(stack).toDouble();
  const Tensor mask = torch::jit::pop(stack).toTensor();
  const Tensor input = torch::jit::pop(stack).toTensor();
  torch::jit::push(stack, input.mul(mask.to(input.scalar_type())).mul_(scale));
}

// ---- softmax of half precision, in single ---------------------------------------------------------------------------

using SoftmaxOut = Tensor& (*)(Tensor&, const Tensor&, std::int64_t, bool);
using SoftmaxBackwardOut = Tensor& (*)(Tensor&, const Tensor&, const Tensor&, std::int64_t, at::ScalarType);

template <SoftmaxOut kSoftmax>
void softmax(Stack& stack, const Generator&) {
  Tensor out = torch::jit::pop(stack).toTensor();
  const bool to_float = torch::jit::pop(stack).toBool();
  const std::int64_t dim = torch::jit::pop(stack).toInt();
  const Tensor input = torch::jit::pop(stack).toTensor();
  torch::jit::push(stack, kSoftmax(out, to_float ? input.to(at::kFloat) : input, dim, false));
}

template <SoftmaxBackwardOut kBackward>
void softmax_backward(Stack& stack, const Generator&) {
  Tensor out = torch::jit::pop(stack).toTensor();
  torch::jit::drop(stack, 1);  // the input's type, which is that of `out`
  const std::int64_t dim = torch::jit::pop(stack).toInt();
  const Tensor output = torch::jit::pop(stack).toTensor();
  const Tensor gradient = torch::jit::pop(stack).toTensor();
  if (out.dtype() == gradient.dtype()) {
    kBackward(out, gradient, output, dim, out.scalar_type());
  } else {
    Tensor wide = at::empty_like(gradient);
    out.copy_(kBackward(wide, gradient, output, dim, gradient.scalar_type()));
  }
  torch::jit::push(stack, out);
}

// ---- histograms of integers, in double ------------------------------------------------------------------------------

void histc(Stack& stack, const Generator&) {
  const at::Scalar highest = torch::jit::pop(stack).toScalar();
  const at::Scalar lowest = torch::jit::pop(stack).toScalar();
  const std::int64_t bins = torch::jit::pop(stack).toInt();
  const Tensor input = torch::jit::pop(stack).toTensor();
  const bool whole = c10::isIntegralType(input.scalar_type(), /*includeBool=*/false);
  const Tensor counts = at::histc(whole ? input.to(at::kDouble) : input, bins, lowest, highest);
  torch::jit::push(stack, counts.to(input.scalar_type()));
}

// ---- cells of recurrent networks ------------------------------------------------------------------------------------

void lstm_cell(Stack& stack, const Generator&) {
  const Tensor hidden_bias = torch::jit::pop(stack).toTensor();
  const Tensor input_bias = torch::jit::pop(stack).toTensor();
  const Tensor cell = torch::jit::pop(stack).toTensor();
  const Tensor hidden_gates = torch::jit::pop(stack).toTensor();
  const Tensor input_gates = torch::jit::pop(stack).toTensor();
  const auto gates = plus(plus(input_gates + hidden_gates, input_bias), hidden_bias).chunk(4, 1);
  const Tensor in = gates[0].sigmoid();
  const Tensor forget = gates[1].sigmoid();
  const Tensor candidate = gates[2].tanh();
  const Tensor out = gates[3].sigmoid();
  const Tensor next = forget * cell + in * candidate;
  torch::jit::push(stack, out * next.tanh(), next, at::cat({in, forget, candidate, out}, 1));
}

void lstm_cell_backward(Stack& stack, const Generator&) {
  const bool has_bias = torch::jit::pop(stack).toBool();
  const auto gates = torch::jit::pop(stack).toTensor().chunk(4, 1);
  const Tensor next = torch::jit::pop(stack).toTensor();
  const Tensor cell = torch::jit::pop(stack).toTensor();
  const Tensor grad_next = zeros_unless(torch::jit::pop(stack).toTensor(), next);
  const Tensor grad_hidden = zeros_unless(torch::jit::pop(stack).toTensor(), next);
  const Tensor &in = gates[0], &forget = gates[1], &candidate = gates[2], &out = gates[3];
  const Tensor bent = next.tanh();
  const Tensor grad_cell = grad_hidden * out * (1 - bent * bent) + grad_next;
  const Tensor grad_gates =
      at::cat({grad_cell * candidate * in * (1 - in), grad_cell * cell * forget * (1 - forget),
               grad_cell * in * (1 - candidate * candidate), grad_hidden * bent * out * (1 - out)},
              1);
  torch::jit::push(stack, grad_gates, grad_cell * forget, has_bias ? grad_gates.sum(0) : Tensor());
}

void gru_cell(Stack& stack, const Generator&) {
  const Tensor hidden_bias = torch::jit::pop(stack).toTensor();
  const Tensor input_bias = torch::jit::pop(stack).toTensor();
  const Tensor hidden = torch::jit::pop(stack).toTensor();
  const auto of_hidden = plus(torch::jit::pop(stack).toTensor(), hidden_bias).chunk(3, 1);
  const auto of_input = plus(torch::jit::pop(stack).toTensor(), input_bias).chunk(3, 1);
  const Tensor reset = (of_input[0] + of_hidden[0]).sigmoid();
  const Tensor update = (of_input[1] + of_hidden[1]).sigmoid();
  const Tensor candidate = (of_input[2] + reset * of_hidden[2]).tanh();
  torch::jit::push(stack, candidate + update * (hidden - candidate),
                   at::cat({reset, update, candidate, hidden, of_hidden[2]}, 1));
}

void gru_cell_backward(Stack& stack, const Generator&) {
  const bool has_bias = torch::jit::pop(stack).toBool();
  const auto saved = torch::jit::pop(stack).toTensor().chunk(5, 1);
  const Tensor gradient = torch::jit::pop(stack).toTensor();
  const Tensor &reset = saved[0], &update = saved[1], &candidate = saved[2], &hidden = saved[3];
  const Tensor grad_candidate = gradient * (1 - update) * (1 - candidate * candidate);
  const Tensor grad_update = gradient * (hidden - candidate) * update * (1 - update);
  const Tensor grad_reset = grad_candidate * saved[4] * reset * (1 - reset);
  const Tensor of_input = at::cat({grad_reset, grad_update, grad_candidate}, 1);
  const Tensor of_hidden = at::cat({grad_reset, grad_update, grad_candidate * reset}, 1);
  torch::jit::push(stack, of_input, of_hidden, gradient * update, has_bias ? of_input.sum(0) : Tensor(),
                   has_bias ? of_hidden.sum(0) : Tensor());
}

}  // namespace

HostKernel host_kernel(const std::string& operator_name) {
  static const std::map<std::string, HostKernel> kernels{
      {"aten::native_dropout", &native_dropout},
      {"aten::_fused_dropout", &fused_dropout},
      {"aten::_masked_scale", &masked_scale},
      {"aten::_softmax.out", &softmax<&at::_softmax_out>},
      {"aten::_log_softmax.out", &softmax<&at::_log_softmax_out>},
      {"aten::_softmax_backward_data.out", &softmax_backward<&at::_softmax_backward_data_out>},
      {"aten::_log_softmax_backward_data.out", &softmax_backward<&at::_log_softmax_backward_data_out>},
      {"aten::histc", &histc},
      {"aten::_thnn_fused_lstm_cell", &lstm_cell},
      {"aten::_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward},
      {"aten::_thnn_fused_gru_cell", &gru_cell},
      {"aten::_thnn_fused_gru_cell_backward", &gru_cell_backward},
  };
  const auto known = kernels.find(operator_name);
  return known == kernels.end() ? nullptr : known->second;
}

}  // namespace emulated_cuda
