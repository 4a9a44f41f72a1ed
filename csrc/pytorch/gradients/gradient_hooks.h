// Where autograd hands gradients over: hooks on faces, and on the nodes that sum into host parameters.
#pragma once

#include <functional>
#include <memory>

#include "csrc/pytorch/gradients/gradient_sink.h"

namespace hydra {

class BlockHomes;
class GradientGathering;

/// Makes `parameter`'s face hand its gradients to `sink` unless `homes` or `gathering` keep them, and its gradient pass
/// the hooks that users put on the host parameter. Unless `active()` holds the sink will not be drained later, and that
/// is done at once. All have to outlive the face's use; clear_gradient_hooks() ends it.
void install_gradient_hooks(HostParameter& parameter, GradientSink& sink, GradientGathering& gathering,
                            BlockHomes& homes, std::function<bool()> active);
void clear_gradient_hooks(HostParameter& parameter);

/// While `active()` holds, gradients that autograd would sum into the host parameter itself go to `sink`: its
/// `.grad` may be under way. Ends with the result.
std::shared_ptr<void> divert_host_gradients(HostParameter& parameter, GradientSink& sink, std::function<bool()> active);

}  // namespace hydra
