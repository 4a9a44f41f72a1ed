// Tensors and storages of the device: made empty, and resized.
//
// Memory comes from torch's caching allocator, on the current stream of the device. Thread-safe as torch's tensors are:
// one tensor at a time. Sizes of storages are bytes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <optional>

namespace emulated_cuda {

at::Tensor empty_on_device(at::IntArrayRef sizes, at::ScalarType dtype, c10::DeviceIndex device,
                           std::optional<at::MemoryFormat> format = std::nullopt);
at::Tensor empty_strided_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                                   c10::DeviceIndex device);

/// Old bytes are copied behind the host. No strides: contiguous ones.
void resize_tensor(const at::Tensor& tensor, at::IntArrayRef sizes, at::OptionalIntArrayRef strides);
void resize_storage(c10::StorageImpl& storage, std::size_t bytes);

}  // namespace emulated_cuda
