"""Makes one microbatch under a watch, which leaves random states and gradients as they are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from hydra_ext.errors import InvalidArgument
from hydra_ext.heads.calls import Heads
from hydra_ext.outputs import check_loss, split
from hydra_ext.profile.watch import Watch
from hydra_ext.state.randomness import RandomState


def run_microbatch(
    watch: Watch,
    model: nn.Module,
    given: list[Any],
    fn: Callable[[Any], Any],
    *,
    mode: AbstractContextManager[Any] | None = None,
) -> None:
    """Makes the forward and the backward of one microbatch.

    Args:
        watch: What notes it.
        model: Its parameters get hooks, which stay.
        given: Has the microbatch, and is emptied, so that nothing here keeps it alive.
        fn: As in ``run.step``.
        mode: What else operators run under.
    """
    watch.exempt([*model.parameters(), *model.buffers()])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise InvalidArgument(
            "the model has no parameter that requires a gradient, so there is no training step to plan: give the model "
            "that is trained, or set requires_grad"
        )
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(watch.take_gradient)  # type: ignore[no-untyped-call]
    with nothing_compiled(), torch.enable_grad(), mode or nullcontext(), watch:
        watch.born(given)
        with saved_tensors_hooks(watch.pack, watch.unpack):
            with watch.watched_calls(model):
                loss, metrics = split(fn(given.pop()))
            check_loss(loss)
            metrics = tree_map_only(Tensor, Tensor.detach, metrics)
            kept, root = loss.detach(), [loss]
            del loss
            watch.begin_backward()
            torch.autograd.backward(root.pop(), inputs=trained)
        del kept, metrics  # alive during backward, as in a step


def in_rows(heads: Heads | None) -> AbstractContextManager[None]:
    """A context in which a model's heads may run in rows."""
    return nullcontext() if heads is None else heads.installed()


def nothing_compiled() -> AbstractContextManager[Any]:
    """Compiled code runs as it was before. Where the compiler was not imported, there is none."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    state = RandomState(device)
    try:
        yield
    finally:
        state.restore()
