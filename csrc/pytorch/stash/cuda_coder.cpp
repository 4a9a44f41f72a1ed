// Coders on a GPU: the kernels of csrc/codec on torch's current stream. Their streams equal those of the host's coders.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAStream.h>

#include <cstring>
#include <utility>

#include "csrc/base/errors.h"
#include "csrc/codec/cuda_codec.h"
#include "csrc/codec/cuda_window_codes.h"
#include "csrc/codec/layout.h"
#include "csrc/pytorch/stash/coder.h"
#include "csrc/transfer/cuda/cuda_error.h"

namespace hydra {

namespace {

cudaStream_t current_stream(c10::Device device) { return c10::cuda::getCurrentCUDAStream(device.index()).stream(); }

at::Tensor bytes_on(c10::Device device, Bytes bytes) {
  return at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
}

/// Enqueues a copy of the bytes to pinned memory. torch keeps the memory alive until the copy has ended.
at::Tensor on_its_way_to_the_host(const at::Tensor& bytes) {
  at::Tensor there = at::empty(bytes.sizes(), at::TensorOptions(at::kByte).pinned_memory(true));
  there.copy_(bytes, /*non_blocking=*/true);
  return there;
}

Bytes length_of_stream(const void* header, Bytes /*made*/) {
  codec::StreamHeader read;
  std::memcpy(&read, header, sizeof read);
  return codec::stream_bytes(read);
}

Bytes length_of_codes(const void* header, Bytes made) {
  std::uint32_t wrong = 0;
  std::memcpy(&wrong, header, sizeof wrong);
  HYDRA_EXPECT(wrong == 0, StateError,
               "a max pool has saved an index outside its window: choose hydra_ext.Offload() for that module "
               "instead of Compress");
  return made;
}

class CudaBoundedCoder final : public Coder {
 public:
  CudaBoundedCoder(NumberFormat format, std::int64_t count, double bound, bool keep_signs)
      : quantizer_(codec::Quantizer::make(format, bound, keep_signs)), count_(count) {}

  Encoded encode(const DeviceBytes& from, CoderRoom& /*room*/) const override {
    const CudaDeviceGuard guard(from.device.index());
    at::Tensor stream = bytes_on(from.device, codec::most_bytes(quantizer_.format, count_));
    const at::Tensor workspace = bytes_on(from.device, codec::workspace_bytes(count_));
    HYDRA_CUDA(codec::launch_compress(quantizer_, codec::Choice::kShortest, from.data, count_,
                                      stream.mutable_data_ptr<std::uint8_t>(), workspace.mutable_data_ptr(),
                                      current_stream(from.device)));
    at::Tensor header = on_its_way_to_the_host(stream.narrow(0, 0, codec::kHeaderBytes));
    return {std::move(stream), std::move(header), &length_of_stream};
  }

  void decode(const DeviceBytes& stream, void* to, CoderRoom& /*room*/) const override {
    const CudaDeviceGuard guard(stream.device.index());
    const at::Tensor workspace = bytes_on(stream.device, codec::workspace_bytes(count_));
    const at::Tensor damaged = bytes_on(stream.device, sizeof(std::uint32_t));
    const codec::StreamHeader header = codec::make_header(quantizer_, count_, /*payload_bytes=*/0);
    HYDRA_CUDA(codec::launch_decompress(
        header, static_cast<const std::uint8_t*>(stream.data), stream.bytes, to, workspace.mutable_data_ptr(),
        static_cast<std::uint32_t*>(damaged.mutable_data_ptr()), current_stream(stream.device)));
  }

 private:
  const codec::Quantizer quantizer_;
  const std::int64_t count_;
};

class CudaWindowCoder final : public Coder {
 public:
  explicit CudaWindowCoder(const codec::PoolGeometry& geometry) : geometry_(geometry) {}

  Encoded encode(const DeviceBytes& from, CoderRoom& /*room*/) const override {
    const CudaDeviceGuard guard(from.device.index());
    at::Tensor stream = bytes_on(from.device, geometry_.stream_bytes());
    const at::Tensor wrong = bytes_on(from.device, sizeof(std::uint32_t));
    HYDRA_CUDA(codec::launch_encode_windows(
        geometry_, static_cast<const std::int64_t*>(from.data), stream.mutable_data_ptr<std::uint8_t>(),
        static_cast<std::uint32_t*>(wrong.mutable_data_ptr()), current_stream(from.device)));
    at::Tensor header = on_its_way_to_the_host(wrong);
    return {std::move(stream), std::move(header), &length_of_codes};
  }

  void decode(const DeviceBytes& stream, void* to, CoderRoom& /*room*/) const override {
    const CudaDeviceGuard guard(stream.device.index());
    HYDRA_CUDA(codec::launch_decode_windows(geometry_, static_cast<const std::uint8_t*>(stream.data),
                                            static_cast<std::int64_t*>(to), current_stream(stream.device)));
  }

 private:
  const codec::PoolGeometry geometry_;
};

}  // namespace

CudaCoders cuda_coders() noexcept {
  return {[](NumberFormat format, std::int64_t count, double bound, bool keep_signs) -> CoderPtr {
            return std::make_shared<CudaBoundedCoder>(format, count, bound, keep_signs);
          },
          [](const codec::PoolGeometry& geometry) -> CoderPtr {
            // With channels last, torch's kernel gives every window that has only -inf the index 0, which may lie
            // outside the window.
            return geometry.inner == 1 ? std::make_shared<CudaWindowCoder>(geometry) : nullptr;
          }};
}

}  // namespace hydra
