#include "emulator/torch/storages.h"

#include <ATen/EmptyTensor.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <utility>

namespace emulated_cuda {

namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

c10::Allocator* device_allocator() { return c10::cuda::CUDACachingAllocator::get(); }

void resize_bytes(c10::TensorImpl& tensor, std::size_t bytes) {
  if (tensor.numel() == 0) {
    return;  // an offset may lie behind the storage's end
  }
  const c10::Storage& storage = tensor.unsafe_storage();
  TORCH_CHECK(storage, "Tensor: invalid null storage");
  if (bytes > storage.nbytes()) {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }
}

}  // namespace

at::Tensor empty_on_device(at::IntArrayRef sizes, at::ScalarType dtype, c10::DeviceIndex device,
                           std::optional<at::MemoryFormat> format) {
  const c10::cuda::CUDAGuard guard(device);
  return at::Tensor(at::detail::empty_generic(sizes, device_allocator(), kKeys, dtype, format));
}

at::Tensor empty_strided_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                                   c10::DeviceIndex device) {
  const c10::cuda::CUDAGuard guard(device);
  return at::Tensor(at::detail::empty_strided_generic(sizes, strides, device_allocator(), kKeys, dtype));
}

void resize_tensor(const at::Tensor& tensor, at::IntArrayRef sizes, at::OptionalIntArrayRef strides) {
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (impl.sizes() == sizes && (!strides || impl.strides() == *strides)) {
    return;
  }
  const auto offset = static_cast<std::size_t>(impl.storage_offset());
  std::size_t bytes = 0;
  if (strides) {
    bytes = at::detail::computeStorageNbytes(sizes, *strides, impl.itemsize(), offset);
    impl.set_sizes_and_strides(sizes, *strides);
  } else {
    bytes = at::detail::computeStorageNbytesContiguous(sizes, impl.itemsize(), offset);
    impl.set_sizes_contiguous(sizes);
  }
  resize_bytes(impl, bytes);
}

void resize_storage(c10::StorageImpl& storage, std::size_t bytes) {
  TORCH_CHECK(storage.resizable(), "Trying to resize storage that is not resizable");
  const c10::Device device = storage.device();
  const c10::cuda::CUDAGuard guard(device.index());
  c10::DataPtr memory(nullptr, device);
  if (bytes > 0) {
    memory = device_allocator()->allocate(bytes);
    if (storage.data() != nullptr) {
      C10_CUDA_CHECK(cudaMemcpyAsync(memory.get(), storage.data(), std::min(bytes, storage.nbytes()),
                                     cudaMemcpyDeviceToDevice, c10::cuda::getCurrentCUDAStream(device.index())));
    }
  }
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}

}  // namespace emulated_cuda
