// Our errors inside torch's operators and its autograd engine.
//
// torch turns a foreign C++ exception into a bare RuntimeError. Errors that leave through an operator or a
// gradient hook are therefore re-thrown as what torch passes on unchanged: a c10::OutOfMemoryError, or a
// Python exception of hydra_ext.errors.
#pragma once

#include <string>

namespace hydra {

/// Call inside a catch block. `explanation` is appended to an out-of-memory message.
[[noreturn]] void rethrow_for_torch(const std::string& explanation);

}  // namespace hydra
