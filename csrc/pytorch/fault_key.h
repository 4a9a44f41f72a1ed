// The dispatch key that device parameters carry: one constant, chosen when the extension is built.
//
// It has to stand above autograd and autocast and to have no kernels of its own. torch may drop one of the
// two that fit; the operator coverage suite runs under both.
#pragma once

#include <c10/core/DispatchKey.h>

#ifndef HYDRA_FAULT_KEY
#define HYDRA_FAULT_KEY DeferredInit
#endif

namespace hydra {

inline constexpr c10::DispatchKey kFaultKey = c10::DispatchKey::HYDRA_FAULT_KEY;

}  // namespace hydra
