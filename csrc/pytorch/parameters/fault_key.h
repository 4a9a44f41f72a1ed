// The dispatch key that tensors carry whose bytes may be away: one constant, chosen when the extension is built.
//
// It has to stand above autograd and autocast and to have no kernels of its own. torch may drop one of the
// two that fit; the operator coverage suite runs under both.
#pragma once

#include <c10/core/DispatchKey.h>
#include <c10/core/TensorImpl.h>

#ifndef HYDRA_FAULT_KEY
#define HYDRA_FAULT_KEY DeferredInit
#endif

namespace hydra {

inline constexpr c10::DispatchKey kFaultKey = c10::DispatchKey::HYDRA_FAULT_KEY;

/// A derived class may name its base's protected member; the pointer then serves for any tensor.
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
