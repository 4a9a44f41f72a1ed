// Random numbers of the emulated device: generators with a seed and an offset, as torch's Philox generators have them.
//
// An operator reserves a draw when it is called; its numbers come, when it runs, from a CPU generator that the draw
// seeds. So they depend on seed, offset and shape alone. They are not the numbers of a GPU. The state is 16 bytes: seed
// and offset. Draws are thread-safe; a generator's other functions are guarded by its own mutex, as torch asks.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

#include <cstdint>
#include <optional>

namespace emulated_cuda {

struct Draw {
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
};

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(c10::DeviceIndex device);

  static c10::DeviceType device_type() { return c10::DeviceType::CUDA; }
  void set_current_seed(std::uint64_t seed) override;
  void set_offset(std::uint64_t offset) override;
  std::uint64_t get_offset() const override { return draw_.offset; }
  std::uint64_t current_seed() const override { return draw_.seed; }
  std::uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

  /// The caller holds the mutex.
  Draw next();

 private:
  DeviceGenerator* clone_impl() const override;

  Draw draw_;
};

at::Generator make_device_generator(c10::DeviceIndex device);
/// -1 is the current device. Seeded by chance.
const at::Generator& default_device_generator(c10::DeviceIndex device);

/// Draws from `generator`, or from the device's default one. Throws torch's error for a generator of another device.
Draw draw_from(const std::optional<at::Generator>& generator, c10::DeviceIndex device);
/// The CPU generator of a draw.
at::Generator host_generator(const Draw& draw);

}  // namespace emulated_cuda
