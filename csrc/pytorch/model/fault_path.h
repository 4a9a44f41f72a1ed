// The software page fault: every operation on a device parameter passes here first.
//
// Device parameters carry a dispatch key (fault_key.h) whose boxed fallback pins the paged inputs of the
// operation, fetches absent ones, dispatches on, and unpins when the operation has returned or thrown. Views
// and composite operations fall through: the operations they are made of come by themselves. Operations on
// other tensors never come here.
//
// In-place writes are seen from the schema and mark the block dirty. Operations that would detach a
// parameter from its storage are refused.
#pragma once

namespace hydra {

/// Registers the fall-throughs for the operators known now. Idempotent; operators registered later take the
/// boxed fallback, which is right and a little slower.
void register_fault_path();

}  // namespace hydra
