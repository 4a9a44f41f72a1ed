#include "emulator/torch/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAFunctions.h>

#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

namespace emulated_cuda {

namespace {

/// Numbers that one thread of a GPU's kernel draws at a time, and the unit of offsets.
constexpr std::uint64_t kOffsetStep = 4;
constexpr std::size_t kStateBytes = 16;

std::uint64_t mixed(std::uint64_t value) {
  value += 0x9e3779b97f4a7c15U;
  value = (value ^ (value >> 30U)) * 0xbf58476d1ce4e5b9U;
  value = (value ^ (value >> 27U)) * 0x94d049bb133111ebU;
  return value ^ (value >> 31U);
}

c10::DeviceIndex real_index(c10::DeviceIndex device) {
  const c10::DeviceIndex index = device == -1 ? c10::cuda::current_device() : device;
  TORCH_CHECK(index >= 0 && index < c10::cuda::device_count(), "there is no device cuda:", static_cast<int>(index));
  return index;
}

}  // namespace

DeviceGenerator::DeviceGenerator(c10::DeviceIndex device)
    : c10::GeneratorImpl(c10::Device(c10::kCUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
      draw_{c10::default_rng_seed_val, 0} {}

void DeviceGenerator::set_current_seed(std::uint64_t seed) { draw_ = {seed, 0}; }

void DeviceGenerator::set_offset(std::uint64_t offset) {
  TORCH_CHECK(offset % kOffsetStep == 0, "offset must be a multiple of 4");
  draw_.offset = offset;
}

std::uint64_t DeviceGenerator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom(true));
  return draw_.seed;
}

void DeviceGenerator::set_state(const c10::TensorImpl& state) {
  TORCH_CHECK_TYPE(
      state.device().is_cpu() && state.dtype() == caffe2::TypeMeta::Make<std::uint8_t>() && state.is_contiguous(),
      "RNG state must be a torch.ByteTensor");
  TORCH_CHECK(state.numel() == static_cast<std::int64_t>(kStateBytes), "RNG state is wrong size");
  std::array<std::uint64_t, 2> words{};
  std::memcpy(words.data(), state.data(), kStateBytes);
  draw_.seed = words[0];
  set_offset(words[1]);
}

c10::intrusive_ptr<c10::TensorImpl> DeviceGenerator::get_state() const {
  const at::TensorBase state = at::detail::empty_cpu({static_cast<std::int64_t>(kStateBytes)}, at::kByte);
  const std::array<std::uint64_t, 2> words{draw_.seed, draw_.offset};
  std::memcpy(state.mutable_data_ptr(), words.data(), kStateBytes);
  return state.getIntrusivePtr();
}

Draw DeviceGenerator::next() {
  const Draw draw = draw_;
  draw_.offset += kOffsetStep;
  return draw;
}

DeviceGenerator* DeviceGenerator::clone_impl() const {
  auto copy = std::make_unique<DeviceGenerator>(device_.index());
  copy->draw_ = draw_;
  return copy.release();  // torch's intrusive pointer owns it
}

at::Generator make_device_generator(c10::DeviceIndex device) {
  return at::make_generator<DeviceGenerator>(real_index(device));
}

const at::Generator& default_device_generator(c10::DeviceIndex device) {
  static std::mutex mutex;
  static std::array<at::Generator, C10_COMPILE_TIME_MAX_GPUS> generators;
  const c10::DeviceIndex index = real_index(device);
  const std::lock_guard lock(mutex);
  at::Generator& generator = generators.at(static_cast<std::size_t>(index));
  if (!generator.defined()) {
    generator = make_device_generator(index);
    generator.seed();
  }
  return generator;
}

Draw draw_from(const std::optional<at::Generator>& generator, c10::DeviceIndex device) {
  const bool given = generator.has_value() && generator->defined();
  const at::Generator& source = given ? *generator : default_device_generator(device);
  TORCH_CHECK(source.device().type() == c10::kCUDA, "Expected a 'cuda' device type for generator but found '",
              source.device().type(), "'");
  auto* const drawn = source.get<DeviceGenerator>();
  const std::lock_guard lock(drawn->mutex_);
  return drawn->next();
}

at::Generator host_generator(const Draw& draw) {
  return at::detail::createCPUGenerator(mixed(mixed(draw.seed) ^ draw.offset));
}

}  // namespace emulated_cuda
