// The errors that the core throws. Each message says what was asked, what was there and what to change.
// The bindings translate every type to the one of the same name in hydra_ext.errors.
#pragma once

#include <stdexcept>
#include <string>

#include "csrc/base/types.h"

namespace hydra {

/// Base of all errors of the core.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A budget, or a memory, has no room for a request. The call that throws it has changed nothing.
class OutOfMemory : public Error {
 public:
  using Error::Error;
};

/// A copy between device and host failed, or a fault script made it fail.
class TransferError : public Error {
 public:
  using Error::Error;
};

/// The disk could not write, or read back, bytes that the host has no room for.
class SpillError : public Error {
 public:
  using Error::Error;
};

/// A call that the present state does not allow, such as the release of a block that is not pinned.
class StateError : public Error {
 public:
  using Error::Error;
};

/// The model has changed since the engine was set up for it.
class ModelChanged : public Error {
 public:
  using Error::Error;
};

/// A pipeline schedule that cannot be made, read or run.
class InvalidSchedule : public Error {
 public:
  using Error::Error;
};

/// An error bound that a codec cannot keep.
class InvalidBound : public Error {
 public:
  using Error::Error;
};

/// Bytes that are not a complete stream of compressed numbers.
class DamagedStream : public Error {
 public:
  using Error::Error;
};

/// An operation met an absent device parameter while the fault path is off.
class PageFaultError : public Error {
 public:
  using Error::Error;
};

/// Formats bytes for messages: "1.50 GiB (1610612736 bytes)", "17 bytes".
std::string human_bytes(Bytes bytes);

}  // namespace hydra

/// Throws `type(message)` unless `condition` holds. For run-time conditions. The message is built only on failure.
#define HYDRA_EXPECT(condition, type, message) \
  do {                                         \
    if (!(condition)) [[unlikely]] {           \
      throw type(message);                     \
    }                                          \
  } while (false)
