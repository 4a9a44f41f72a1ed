#include "csrc/pytorch/stash/coder.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <utility>

#include "csrc/codec/codec.h"
#include "csrc/codec/kernels/kernels.h"
#include "csrc/pytorch/threads/gil.h"

namespace hydra {

namespace {

CudaCoders coders_on_cuda;  // set when the extension is loaded

InstructionSet fastest() {
  static const InstructionSet chosen = codec::supported_instruction_sets().back();
  return chosen;
}

at::Tensor bytes_on(c10::Device device, Bytes bytes) {
  return at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
}

class BoundedCoder final : public Coder {
 public:
  BoundedCoder(NumberFormat format, std::int64_t count, double bound, bool keep_signs)
      : quantizer_(codec::Quantizer::make(format, bound, keep_signs)), count_(count) {}

  Encoded encode(const DeviceBytes& from, CoderRoom& room) const override {
    at::Tensor scratch = room.take_scratch(codec::most_bytes(quantizer_.format, count_));
    Bytes length = 0;
    {
      const ReleaseGilIfHeld released;
      length = codec::compress(quantizer_, codec::Choice::kShortest, from.data, count_,
                               scratch.mutable_data_ptr<std::uint8_t>(), room.threads(), fastest());
    }
    at::Tensor stream = bytes_on(from.device, length);
    std::memcpy(stream.mutable_data_ptr(), scratch.const_data_ptr(), static_cast<std::size_t>(length));
    room.give_back(std::move(scratch));
    return {std::move(stream), {}};
  }

  void decode(const DeviceBytes& stream, void* to, CoderRoom& room) const override {
    const ReleaseGilIfHeld released;
    const std::span whole(static_cast<const std::uint8_t*>(stream.data), static_cast<std::size_t>(stream.bytes));
    codec::decompress(whole, to, room.threads(), fastest());
  }

 private:
  const codec::Quantizer quantizer_;
  const std::int64_t count_;
};

class WindowCoder final : public Coder {
 public:
  explicit WindowCoder(const codec::PoolGeometry& geometry) : geometry_(geometry) {}

  Encoded encode(const DeviceBytes& from, CoderRoom& room) const override {
    at::Tensor stream = bytes_on(from.device, geometry_.stream_bytes());
    const ReleaseGilIfHeld released;
    const bool all = codec::encode_windows(geometry_, static_cast<const std::int64_t*>(from.data),
                                           stream.mutable_data_ptr<std::uint8_t>(), room.threads());
    return all ? Encoded{std::move(stream), {}} : Encoded{};
  }

  void decode(const DeviceBytes& stream, void* to, CoderRoom& room) const override {
    const ReleaseGilIfHeld released;
    codec::decode_windows(geometry_, static_cast<const std::uint8_t*>(stream.data), static_cast<std::int64_t*>(to),
                          room.threads());
  }

 private:
  const codec::PoolGeometry geometry_;
};

}  // namespace

ThreadPool& CoderRoom::threads() {
  const std::lock_guard lock(mutex_);
  if (!threads_) {
    threads_ = std::make_unique<ThreadPool>(at::get_num_threads());
  }
  return *threads_;
}

at::Tensor CoderRoom::take_scratch(Bytes bytes) {
  at::Tensor kept;
  {
    const std::lock_guard lock(mutex_);
    kept = std::exchange(scratch_, at::Tensor());
  }
  if (kept.defined() && kept.numel() >= bytes) {
    return kept;
  }
  kept.reset();
  return bytes_on(c10::kCPU, bytes);
}

void CoderRoom::give_back(at::Tensor scratch) noexcept {
  const std::lock_guard lock(mutex_);
  if (!scratch_.defined() || scratch_.numel() < scratch.numel()) {
    std::swap(scratch_, scratch);
  }
}

void CoderRoom::clear() noexcept {
  at::Tensor kept;
  const std::lock_guard lock(mutex_);
  kept = std::exchange(scratch_, at::Tensor());
}

Bytes Encoded::length() const {
  return header.defined() ? read(header.const_data_ptr(), stream.numel()) : stream.numel();
}

CoderPtr make_bounded_coder(c10::Device device, NumberFormat format, std::int64_t count, double bound,
                            bool keep_signs) {
  if (device.is_cpu()) {
    return std::make_shared<BoundedCoder>(format, count, bound, keep_signs);
  }
  return coders_on_cuda.bounded == nullptr ? nullptr : coders_on_cuda.bounded(format, count, bound, keep_signs);
}

CoderPtr make_window_coder(c10::Device device, const codec::PoolGeometry& geometry) {
  if (geometry.bits() == 0) {
    return nullptr;
  }
  if (device.is_cpu()) {
    return std::make_shared<WindowCoder>(geometry);
  }
  return coders_on_cuda.windows == nullptr ? nullptr : coders_on_cuda.windows(geometry);
}

void set_cuda_coders(CudaCoders coders) noexcept { coders_on_cuda = coders; }

}  // namespace hydra
