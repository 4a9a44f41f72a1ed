// How a stash makes a tensor's bytes fewer, and the tensor out of them again.
//
// encode() and decode() run where the bytes are: on a GPU on torch's current stream, and wait for nothing there. How
// long a stream has become the host learns later. Coders are immutable, and shared by threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <optional>

#include "csrc/base/number_format.h"
#include "csrc/base/thread_pool.h"
#include "csrc/base/types.h"
#include "csrc/codec/window_codes.h"

namespace hydra {

/// What coders of one stash work with on the host.
class CoderRoom {
 public:
  /// As many threads as torch computed with when it was first asked for.
  ThreadPool& threads();
  /// Of the least so many bytes, content undefined; its owner's until it is given back. Only the last one is kept.
  at::Tensor take_scratch(Bytes bytes);
  void give_back(at::Tensor scratch) noexcept;
  void clear() noexcept;

 private:
  std::mutex mutex_;
  std::unique_ptr<ThreadPool> threads_;
  at::Tensor scratch_;
};

/// Bytes on a device.
struct DeviceBytes {
  const void* data = nullptr;
  Bytes bytes = 0;
  c10::Device device = c10::kCPU;
};

/// A stream on its device; without one where it was not possible.
struct Encoded {
  at::Tensor stream;  // bytes, those behind its end undefined
  // What it takes to know its end, on the host once the device has come there; undefined if it is all of it.
  at::Tensor header;
  Bytes (*read)(const void* header, Bytes made) = nullptr;

  /// Throws what went wrong on the device.
  Bytes length() const;
};

class Coder {
 public:
  Coder() = default;
  Coder(const Coder&) = delete;
  Coder& operator=(const Coder&) = delete;
  virtual ~Coder() = default;

  virtual Encoded encode(const DeviceBytes& from, CoderRoom& room) const = 0;
  /// `stream` may be longer than what was encoded. `to` has all the bytes that were encoded.
  virtual void decode(const DeviceBytes& stream, void* to, CoderRoom& room) const = 0;
};

using CoderPtr = std::shared_ptr<const Coder>;

/// Of `count` numbers that may come back up to `bound` off (csrc/codec/codec.h). Null where this build has no such
/// coder.
CoderPtr make_bounded_coder(c10::Device device, NumberFormat format, std::int64_t count, double bound, bool keep_signs);
/// Of a pool's indices, exactly (csrc/codec/window_codes.h). Null likewise, and for windows that are too large.
CoderPtr make_window_coder(c10::Device device, const codec::PoolGeometry& geometry);

struct CudaCoders {
  CoderPtr (*bounded)(NumberFormat format, std::int64_t count, double bound, bool keep_signs) = nullptr;
  CoderPtr (*windows)(const codec::PoolGeometry& geometry) = nullptr;
};
/// In builds with CUDA: cuda_coder.cpp's.
void set_cuda_coders(CudaCoders coders) noexcept;
CudaCoders cuda_coders() noexcept;

}  // namespace hydra
