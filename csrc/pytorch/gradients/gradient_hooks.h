// The hooks through which autograd hands gradients over: on faces, and on the nodes that sum into host parameters.
#pragma once

#include <functional>
#include <memory>

#include "csrc/pytorch/gradients/gradient_sink.h"

namespace hydra {

class BlockHomes;
class GradientGathering;

/// Makes the face of `parameter` hand its gradients to `sink`, unless `homes` or `gathering` keep them. Before that,
/// the gradients pass the hooks that users registered on the host parameter, and `summed()` is called. If `active()`
/// returns false, no window will drain the sink, so it is drained at once. All arguments have to stay alive until
/// clear_gradient_hooks().
void install_gradient_hooks(HostParameter& parameter, GradientSink& sink, GradientGathering& gathering,
                            BlockHomes& homes, std::function<bool()> active, std::function<void()> summed);
void clear_gradient_hooks(HostParameter& parameter);

/// While `active()` returns true, sends gradients that autograd would sum into the host parameter itself to `sink`,
/// because the bytes of its `.grad` may be under way. Ends when the result is destroyed.
std::shared_ptr<void> divert_host_gradients(HostParameter& parameter, GradientSink& sink, std::function<bool()> active);

}  // namespace hydra
