"""Modules whose saved tensors are recomputed in backward.

Such a module's call becomes a non-reentrant checkpoint. Tensors that are saved inside are dropped, and a second call
makes them again when backward first asks for one. The checkpoint saves the call's arguments, which go to the stash
around it.

A stand-in replaces the module's call. So the module's own hooks run in both calls, and pre-hooks that compute weights
compute them again.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hydra_ext import _C
from hydra_ext.activations import functional
from hydra_ext.activations.groups import Groups, Span
from hydra_ext.activations.repeatable import Deviation, RepeatableCall
from hydra_ext.calls import StandIn
from hydra_ext.errors import UnsupportedModel
from hydra_ext.state.randomness import RandomState
from hydra_ext.tracing import not_traced

CALLS_IN_FULL = 3  # first calls of a module whose outputs are compared, too
_saved_tensors_hooked = torch._C._autograd._top_saved_tensors_default_hooks
Whole = Callable[[nn.Module], AbstractContextManager[object] | None]
"""Gives a context in which a call of a module would now run to its end before another one begins; None if none does."""


class Count:
    """A counter that any thread may increase."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.value = 0

    def add(self) -> None:
        with self._lock:
            self.value += 1


class RecomputedModule(StandIn):
    """Stands in for the call of a module that is recomputed.

    Args:
        core: Stash that keeps the call's arguments, and not the tensors saved inside.
        module: Any module.
        whole: See :data:`Whole`. If there is no such context, the module is not recomputed.
        again: Counter of second calls.
        tried_on: Device on which the first call is repeated at once, to see whether it can be; the stash takes what it
            saves. None takes it for granted.

    Attributes:
        deviated: Whether a second call differed from the first. From then on the module is not recomputed.
    """

    def __init__(
        self, core: _C.Stash, module: nn.Module, whole: Whole, again: Count, *, tried_on: torch.device | None = None
    ) -> None:
        super().__init__(module)
        self._tried_on = tried_on
        self.core = core
        self.again = again
        self.deviated = False
        self._calls = 0
        self._whole = whole

    @not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recomputed = torch.is_grad_enabled() and self._saves_to_the_stash() and not self.deviated
        whole = self._whole(self.module) if recomputed else None
        if whole is None:
            return self.call(args, kwargs)
        with whole:
            if self._tried_on is not None:
                device, self._tried_on = self._tried_on, None
                return self._tried(device, args, kwargs)
            return self._recomputed(args, kwargs)

    def _tried(self, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a call, and a second one that leaves nothing behind. If they differ, the module is not recomputed."""
        call = _CheckedCall(self, args, kwargs, in_full=True)
        tensors, versions = call.tensors, [*_versions(call.tensors), *call.parameters]
        before, transforms = RandomState(device, host=False), functional.transforms()
        output = call(*tensors)
        after = RandomState(device, host=False)
        has_written = any(_version(tensor) != version for tensor, version in versions)
        if has_written or functional.transforms() != transforms:
            self.deviated = True
            return output
        before.restore()
        try:
            with torch.enable_grad(), saved_tensors_hooks(_dropped, _dropped):
                call.again(tensors)
        except Exception:  # noqa: BLE001 - whatever it is, the first call has not raised it, and its output stands
            self.deviated = True
        finally:
            after.restore()
        return output

    def _recomputed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        in_full = self._calls < CALLS_IN_FULL
        self._calls += 1
        call = _CheckedCall(self, args, kwargs, in_full=in_full)
        versions = [*_versions(call.tensors), *call.parameters]
        tensors = [*call.tensors, *_witness(self.module)]
        output = checkpoint(call, *tensors, use_reentrant=False, early_stop=not in_full)
        if any(_version(tensor) != version for tensor, version in versions):
            raise UnsupportedModel(
                f"a {type(self.module).__name__} writes to its inputs, or to its parameters, so a second call would "
                "compute with other numbers: choose hydra_ext.Recompute() for the module around it, or another policy"
            )
        return output

    @not_traced
    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.inner(*args, **kwargs)

    def _saves_to_the_stash(self) -> bool:
        """Whether tensors saved now go to this stash, and not to a checkpoint, another stash or the user's hooks."""
        hooks = _saved_tensors_hooked(True)
        return hooks is not None and getattr(hooks[0], "__self__", None) is self.core


class RecomputedModules:
    """The recomputed modules of one stash: those with the policy, and those that a plan has chosen.

    Attributes:
        again: Counter of second calls.
    """

    def __init__(self, core: _C.Stash, whole: Whole) -> None:
        self._core = core
        self._whole = whole
        self._groups = Groups()
        self._chosen: dict[nn.Module, RecomputedModule] = {}  # now or before
        self.again = Count()

    def of_policy(self, module: nn.Module) -> RecomputedModule:
        return RecomputedModule(self._core, module, self._whole, self.again)

    def choose(self, chosen: Collection[nn.Module | Span], device: torch.device | None) -> None:
        """From now on these modules and groups are recomputed if a second call on the device repeats the first."""
        groups = self._groups.choose([each for each in chosen if isinstance(each, Span)])
        wanted = dict.fromkeys([*groups, *(each for each in chosen if isinstance(each, nn.Module))])
        for module, call in self._chosen.items():
            if module not in wanted:
                call.remove()
        for module in wanted:
            if module not in self._chosen:
                self._chosen[module] = RecomputedModule(self._core, module, self._whole, self.again, tried_on=device)
            self._chosen[module].install(innermost=True)


class _CheckedCall(RepeatableCall):
    """A repeatable call that raises before the second call if a parameter or buffer has changed since the first.

    Attributes:
        parameters: Parameters of the module, each with its version before the call.
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
            f"a {self._kind} with the policy hydra_ext.Recompute() gives something else when it is called a second "
            "time: its forward reads or changes state that is neither a buffer nor an attribute of its modules nor an "
            "argument. Choose hydra_ext.Offload() or hydra_ext.Keep() for it"
        )


def _dropped(_tensor: Any) -> Any:
    """Drops a saved tensor, as such a call has no backward."""


def _held(core: _C.Stash, tensor: Tensor) -> Callable[[], Tensor]:
    saved = core.pack(tensor)
    return lambda: core.unpack(saved)


def _versions(tensors: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
    return [(tensor, _version(tensor)) for tensor in tensors]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _witness(module: nn.Module) -> list[Tensor]:
    """An empty tensor on the module's GPU: a checkpoint restores the random states of its tensors' GPUs only."""
    own = next(itertools.chain(module.parameters(), module.buffers()), None)
    return [] if own is None or own.device.type == "cpu" else [torch.empty(0, device=own.device)]
