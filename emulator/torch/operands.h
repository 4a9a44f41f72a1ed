// The tensors that an operation on a stream reads and writes: addresses, sizes and strides of device tensors, and
// copies of host tensors.
//
// Holds no device storage: an operation sees what its addresses hold when it runs, as a kernel does. Tensors that share
// a storage here share one there too, and one tensor given twice is one tensor there. Device memory is touched only
// through `open`, on a stream's thread. Copyable; not thread-safe. Sizes are bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

namespace emulated_cuda {

class Operands {
 public:
  static constexpr int kUndefined = -1;

  /// Returns the operand's number. A host tensor is copied now.
  int add(const at::Tensor& tensor);
  /// The tensor has another size or storage now.
  void update(int number, const at::Tensor& tensor);
  std::size_t size() const noexcept { return operands_.size(); }
  /// The operand whose storage begins there, or kUndefined.
  int find_storage(const void* data) const noexcept;
  /// Whether the operand still has the sizes and strides of `tensor`.
  bool lies_as(int number, const at::Tensor& tensor) const;
  bool on_host(int number) const { return operands_[static_cast<std::size_t>(number)].host.defined(); }

  /// CPU tensors over the same bytes. One that an operator makes larger gets memory of the host.
  std::vector<at::Tensor> open() const;
  /// Tensors on meta of the same sizes and storages. Host tensors without dimensions stay as they are.
  std::vector<at::Tensor> open_on_meta() const;
  /// The first byte of the storage of an operand.
  const void* data(int number) const;

 private:
  struct Bytes {
    void* data = nullptr;
    std::size_t size = 0;
    const void* storage = nullptr;  // only compared
  };
  struct Operand {
    at::Tensor host;
    const void* tensor = nullptr;  // only compared
    std::size_t bytes = 0;         // an index
    at::DimVector sizes;
    at::DimVector strides;
    std::int64_t offset = 0;
    caffe2::TypeMeta dtype;
    bool conjugate = false;
    bool negative = false;
  };

  Operand describe(const at::Tensor& tensor);
  std::vector<at::Tensor> open_on(c10::Device device) const;

  std::vector<Bytes> bytes_;
  std::vector<Operand> operands_;
};

}  // namespace emulated_cuda
