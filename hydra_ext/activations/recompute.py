"""Modules whose saved tensors are made again in backward.

Such a module's call becomes a non-reentrant checkpoint: what is saved inside is forgotten, and made by a second call
when backward first asks for it. The call's tensors are what the checkpoint saves, and so go to the stash around it.

The module's call has a stand-in: hooks of its own belong to both calls, and pre-hooks that make weights make them
again.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hydra_ext import _C
from hydra_ext.activations.repeatable import Deviation, RepeatableCall
from hydra_ext.calls import StandIn
from hydra_ext.errors import UnsupportedModel
from hydra_ext.tracing import not_traced

CALLS_IN_FULL = 3  # of a module: what they give is compared, too
_saved_tensors_hooked = torch._C._autograd._top_saved_tensors_default_hooks
Whole = Callable[[nn.Module], bool]


class Count:
    """How often something happened, on whatever threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.value = 0

    def add(self) -> None:
        with self._lock:
            self.value += 1


class RecomputedModule(StandIn):
    """Stands in for a module's call.

    Args:
        core: the stash that what would be saved inside does not go to.
        module: any.
        whole: whether a call of it, as things are, runs to its end before another one begins.
        again: counts the calls that are made a second time.

    Attributes:
        deviated: whether a second call has been seen to differ from the first; then it is not made again any more.
    """

    def __init__(self, core: _C.Stash, module: nn.Module, whole: Whole, again: Count) -> None:
        super().__init__(module)
        self.core = core
        self.again = again
        self.deviated = False
        self._calls = 0
        self._whole = whole

    @not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recomputed = torch.is_grad_enabled() and self._saves_to_the_stash() and not self.deviated
        if not (recomputed and self._whole(self.module)):
            return self.call(args, kwargs)
        in_full = self._calls < CALLS_IN_FULL
        self._calls += 1
        call = _CheckedCall(self, args, kwargs, in_full=in_full)
        versions = [*_versions(call.tensors), *call.parameters]
        tensors = [*call.tensors, *_witness(self.module)]
        output = checkpoint(call, *tensors, use_reentrant=False, early_stop=not in_full)  # checked at its end
        if any(_version(tensor) != version for tensor, version in versions):
            raise UnsupportedModel(
                f"a {type(self.module).__name__} writes to its inputs, or to its parameters, so that it cannot be "
                "called a second time with what was there: choose hydra_ext.Recompute() for the module around it, or "
                "another policy"
            )
        return output

    @not_traced
    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.inner(*args, **kwargs)

    def _saves_to_the_stash(self) -> bool:
        """And not to another checkpoint, to another stash or to hooks of the user's."""
        hooks = _saved_tensors_hooked(True)
        return hooks is not None and getattr(hooks[0], "__self__", None) is self.core


class _CheckedCall(RepeatableCall):
    """One that raises where the second call would not be the first one again.

    Attributes:
        parameters: of the module, each with its version before the call.
    """

    def __init__(
        self, owner: RecomputedModule, args: tuple[Any, ...], kwargs: dict[str, Any], *, in_full: bool
    ) -> None:
        hold = partial(_held, owner.core)
        super().__init__(owner.module, owner.call, args, kwargs, in_full=in_full, hold=hold)
        self._owner = owner
        self._count = len(self.tensors)
        self._kind = type(owner.module).__name__
        self.parameters = _versions(owner.module.parameters())

    @not_traced
    def again(self, tensors: Sequence[Tensor]) -> Any:
        noted = [*self.parameters, *self.trusted]
        now = [*self._owner.module.parameters(), *(buffer for buffer, _ in self.trusted)]
        same = len(now) == len(noted) and all(
            one is other and _version(one) == version for one, (other, version) in zip(now, noted, strict=True)
        )
        if not same:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation, or "
                f"replaced: a parameter or buffer of a {self._kind} that is called a second time in backward, after "
                "its first call"
            )
        self._owner.again.add()
        return super().again(tensors[: self._count])

    def deviation(self) -> Deviation:
        self._owner.deviated = True
        return Deviation(
            f"a {self._kind} that hydra_ext.Recompute() was chosen for gives something else when it is called a second "
            "time: its forward changes, or reads, what is neither a buffer nor an attribute of its modules nor an "
            "argument. Choose hydra_ext.Offload() or hydra_ext.Keep() for it"
        )


def _held(core: _C.Stash, tensor: Tensor) -> Callable[[], Tensor]:
    saved = core.pack(tensor)
    return lambda: core.unpack(saved)


def _versions(tensors: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
    return [(tensor, _version(tensor)) for tensor in tensors]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _witness(module: nn.Module) -> list[Tensor]:
    """Of no bytes, on the module's GPU: a checkpoint keeps the random states of those that its tensors are on."""
    own = next(itertools.chain(module.parameters(), module.buffers()), None)
    return [] if own is None or own.device.type == "cpu" else [torch.empty(0, device=own.device)]
