// Carries our errors through torch's operators and its autograd engine.
//
// torch turns a foreign C++ exception into a bare RuntimeError. Errors that leave through an operator or a
// gradient hook are therefore re-thrown as types that torch passes on unchanged: c10::OutOfMemoryError, or a
// Python exception of hydra_ext.errors. Threads: any, with or without the interpreter lock.
#pragma once

#include <string>

namespace hydra {

/// Re-throws the current exception, inside a catch block. Appends `explanation` to an out-of-memory message.
[[noreturn]] void rethrow_for_torch(const std::string& explanation);

}  // namespace hydra
