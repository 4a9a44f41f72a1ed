// The software page fault: every operation on a device parameter is dispatched here first.
//
// Device parameters carry a dispatch key (fault_key.h) whose boxed fallback pins the paged inputs of the operation,
// fetches absent ones, dispatches on, and unpins when the operation has returned or thrown. Views and composite
// operations fall through, since the operations that they call are dispatched here themselves. Operations on other
// tensors never are.
//
// The schema tells which inputs an operation writes in place; their blocks become dirty. Operations that would detach a
// parameter from its storage are refused.
#pragma once

namespace hydra {

/// Registers the fall-throughs for the operators known now. Idempotent. Operators registered later take the boxed
/// fallback, which is correct but a little slower.
void register_fault_path();

}  // namespace hydra
