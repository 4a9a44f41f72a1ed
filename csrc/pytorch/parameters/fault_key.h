// The dispatch key of tensors whose bytes may be absent: one constant, chosen when the extension is built.
//
// The key has to be above autograd and autocast, and to have no kernels of its own. Two keys of torch fit, and torch
// may drop one of them; the operator coverage suite runs under both. Threads: as for any change to a tensor.
#pragma once

#include <c10/core/DispatchKey.h>
#include <c10/core/TensorImpl.h>

#ifndef HYDRA_FAULT_KEY
#define HYDRA_FAULT_KEY DeferredInit
#endif

namespace hydra {

inline constexpr c10::DispatchKey kFaultKey = c10::DispatchKey::HYDRA_FAULT_KEY;

/// Gives access to a protected member: a derived class may name it, and the pointer serves for any tensor.
struct KeySetAccess final : c10::TensorImpl {
  static constexpr c10::DispatchKeySet c10::TensorImpl::* kMember = &KeySetAccess::key_set_;
};

inline void add_fault_key(c10::TensorImpl& tensor) noexcept {
  c10::DispatchKeySet& keys = tensor.*KeySetAccess::kMember;
  keys = keys.add(kFaultKey);
}

inline void remove_fault_key(c10::TensorImpl& tensor) noexcept {
  c10::DispatchKeySet& keys = tensor.*KeySetAccess::kMember;
  keys = keys.remove(kFaultKey);
}

}  // namespace hydra
