// The errors the core throws. Each message says what was asked, what was there and what to change;
// the bindings translate every type one to one (hydra_ext.errors).
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

/// A budget or a memory could not give what was asked. Nothing was changed by the call that throws it.
class OutOfMemory : public Error {
 public:
  using Error::Error;
};

/// A copy between device and host failed, or was told to by a fault script.
class TransferError : public Error {
 public:
  using Error::Error;
};

/// The disk could not keep, or give back, what the host has no room for.
class SpillError : public Error {
 public:
  using Error::Error;
};

/// A call that the present state does not allow, for example releasing what is not held.
class StateError : public Error {
 public:
  using Error::Error;
};

/// The model is no longer what the engine was set up for.
class ModelChanged : public Error {
 public:
  using Error::Error;
};

/// A pipeline schedule that cannot be made, read or run.
class InvalidSchedule : public Error {
 public:
  using Error::Error;
};

/// An error bound that a compression cannot keep to.
class InvalidBound : public Error {
 public:
  using Error::Error;
};

/// Bytes that are no whole stream of compressed numbers.
class DamagedStream : public Error {
 public:
  using Error::Error;
};

/// A device parameter was needed while absent and the fault path is off.
class PageFaultError : public Error {
 public:
  using Error::Error;
};

/// "1.50 GiB", "12.0 KiB", "17 bytes": for messages only.
std::string human_bytes(Bytes bytes);

}  // namespace hydra

/// Throws `type(message)` unless `condition` holds. For run-time conditions; the message is built only then.
#define HYDRA_EXPECT(condition, type, message) \
  do {                                         \
    if (!(condition)) [[unlikely]] {           \
      throw type(message);                     \
    }                                          \
  } while (false)
