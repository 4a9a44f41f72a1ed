// What a thread writes to faces, with the numbers from before, so that a call made a second time leaves no trace.
//
// Threads: the one that began it calls all members. Objects may be nested; each has all writes while it was active.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>

namespace hydra {

struct HostParameter;

struct FaceWrite {
  at::Tensor face;
  std::uint32_t version = 0;  // before the first write
  at::Tensor before;          // the numbers then, on the host
};

class FaceWrites {
 public:
  FaceWrites() = default;
  FaceWrites(const FaceWrites&) = delete;
  FaceWrites& operator=(const FaceWrites&) = delete;
  ~FaceWrites() { end(); }

  void begin();
  /// Idempotent.
  void end() noexcept;
  /// Restores the faces' numbers and versions, so that graphs that have saved them stay valid. Called after end().
  void undo();

  /// Notes that an operation on this thread is about to write the parameter's face.
  static void note(const HostParameter& parameter);

 private:
  bool active_ = false;
  std::map<const HostParameter*, FaceWrite> writes_;
};

}  // namespace hydra
