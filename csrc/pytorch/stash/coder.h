// Coders turn a tensor's bytes into a shorter stream, and the stream back into the bytes.
//
// encode() and decode() run on the device that has the bytes. On a GPU they use torch's current stream and do not wait,
// so that the host learns the length of a stream later. Coders are immutable. Threads: any.
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

/// The threads and the scratch memory that the coders of one stash use on the host.
class CoderRoom {
 public:
  /// The thread pool. The first call makes it with as many threads as torch computes with then.
  ThreadPool& threads();
  /// Lends at least `bytes` bytes with undefined contents, until give_back(). Of the returned ones, the largest is
  /// kept.
  at::Tensor take_scratch(Bytes bytes);
  void give_back(at::Tensor scratch) noexcept;
  void clear() noexcept;

 private:
  std::mutex mutex_;
  std::unique_ptr<ThreadPool> threads_;
  at::Tensor scratch_;
};

/// A range of bytes on a device.
struct DeviceBytes {
  const void* data = nullptr;
  Bytes bytes = 0;
  c10::Device device = c10::kCPU;
};

/// A stream on its device. It is undefined if the bytes could not be encoded.
struct Encoded {
  at::Tensor stream;  // bytes; those behind the end of the stream are undefined
  // The part from which `read` takes the length, on the host once the device has copied it. It is undefined if `stream`
  // has no bytes behind its end.
  at::Tensor header;
  Bytes (*read)(const void* header, Bytes made) = nullptr;

  /// Returns the length of the stream. Throws the error that the device reported.
  Bytes length() const;
};

class Coder {
 public:
  Coder() = default;
  Coder(const Coder&) = delete;
  Coder& operator=(const Coder&) = delete;
  virtual ~Coder() = default;

  virtual Encoded encode(const DeviceBytes& from, CoderRoom& room) const = 0;
  /// Decodes all bytes into `to`. `stream` may have bytes behind its end.
  virtual void decode(const DeviceBytes& stream, void* to, CoderRoom& room) const = 0;
};

using CoderPtr = std::shared_ptr<const Coder>;

/// Makes a coder for `count` numbers, each of which may come back with an error up to `bound` (csrc/codec/codec.h).
/// Null if this build has none for the device.
CoderPtr make_bounded_coder(c10::Device device, NumberFormat format, std::int64_t count, double bound, bool keep_signs);
/// Makes an exact coder for the indices of a pool (csrc/codec/window_codes.h). Null if this build has none for the
/// device, or the windows are too large.
CoderPtr make_window_coder(c10::Device device, const codec::PoolGeometry& geometry);

struct CudaCoders {
  CoderPtr (*bounded)(NumberFormat format, std::int64_t count, double bound, bool keep_signs) = nullptr;
  CoderPtr (*windows)(const codec::PoolGeometry& geometry) = nullptr;
};
/// Sets the makers of coders for GPUs. Builds with CUDA have cuda_coders(), of cuda_coder.cpp.
void set_cuda_coders(CudaCoders coders) noexcept;
CudaCoders cuda_coders() noexcept;

}  // namespace hydra
