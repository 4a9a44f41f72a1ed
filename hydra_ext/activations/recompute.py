"""Modules whose saved tensors are recomputed in backward.

Such a module's call becomes a non-reentrant checkpoint. Tensors that are saved inside are dropped, and a second call
makes them again when backward first asks for one. The checkpoint saves the call's arguments, which go to the stash
around it.

Inside of such a call other modules can be its pieces. A piece is a checkpoint, too, and saves its arguments in the one
around it. So the second call of that one drops what the piece saves, and the piece's own backward calls it again.

A stand-in replaces the module's call. So the module's own hooks run in both calls, and pre-hooks that compute weights
compute them again.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
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
from hydra_ext.calls import StandIn, standing_in
from hydra_ext.errors import UnsupportedModel
from hydra_ext.state.arguments import tensors_in
from hydra_ext.state.memory import moves_by_rows
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
        is_piece: Whether the module is recomputed only inside calls of another recomputed one. Both calls of that one
            drop what the module saves, and its own backward calls it a third time.

    Attributes:
        deviated: Whether a second call differed from the first. From then on the module is not recomputed.
        pieces: Those that calls from now on have inside.
    """

    def __init__(
        self,
        core: _C.Stash,
        module: nn.Module,
        whole: Whole,
        again: Count,
        *,
        tried_on: torch.device | None = None,
        is_piece: bool = False,
    ) -> None:
        super().__init__(module)
        self._is_piece = is_piece
        self._tried_on = tried_on
        self.core = core
        self.again = again
        self.deviated = False
        self.pieces: tuple[RecomputedModule, ...] = ()
        self._calls = 0
        self._whole = whole

    @not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_piece:
            return self._in_a_call(args, kwargs)
        recomputed = torch.is_grad_enabled() and self._saves_to_the_stash() and not self.deviated
        whole = self._whole(self.module) if recomputed else None
        if whole is None:
            return self.call(args, kwargs)
        with whole:  # which may have waited for another microbatch's trial
            if self.deviated:
                return self.call(args, kwargs)
            if self._tried_on is None:
                return self._recomputed(args, kwargs)
            device, self._tried_on = self._tried_on, None
            try:
                return self._tried(device, args, kwargs)
            except BaseException:  # the trial is still to come
                self._tried_on = device
                raise

    def _tried(self, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a call, and a second one that leaves nothing behind. If they differ, the module is not recomputed.

        Both are in one piece. Pieces whose arguments are written to later in the call are recomputed no more.
        """
        call = _CheckedCall(self, args, kwargs, in_full=True, in_one_piece=True)
        tensors, versions = call.tensors, [*_versions(call.tensors), *call.parameters]
        before, transforms = RandomState(device, host=False), functional.transforms()
        output = call(*tensors)
        call.drop_unfit()
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
        # A second call's writes to device parameters are undone, and it writes to no tables. No others can be undone.
        others = [each for each, _ in call.parameters if not (_C.is_face(each) or moves_by_rows(each))]
        versions = _versions([*call.tensors, *others])
        numbers = _digest(others if in_full else ())  # a write through `.data` changes no version
        tensors = [*call.tensors, *_witness(self.module)]
        output = checkpoint(call, *tensors, use_reentrant=False, early_stop=not in_full)
        written = any(_version(tensor) != version for tensor, version in versions)
        if written or not _digest(others if in_full else ()).equals(numbers):
            raise UnsupportedModel(
                f"a {type(self.module).__name__} writes to its inputs, or to its parameters, so a second call would "
                "compute with other numbers: choose hydra_ext.Recompute() for the module around it, or another policy"
            )
        return output

    @not_traced
    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.inner(*args, **kwargs)

    def _in_a_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A piece's call. Its hooks on saved tensors tell of which call it is a part."""
        hooks = _saved_tensors_hooked(True)
        around = None if hooks is None else getattr(hooks[0], "call", None)
        if isinstance(around, _CheckedCall) and torch.is_grad_enabled() and not self.deviated:
            if self in around.pieces:
                return self._recomputed(args, kwargs)
            around.note(self, args, kwargs)
        return self.call(args, kwargs)

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
        self._chosen: dict[tuple[nn.Module, bool], RecomputedModule] = {}  # now or before, and whether it is a piece
        self.again = Count()

    def is_refused(self, chosen: nn.Module | Span) -> bool:
        """Whether a second call of it has differed, so that it is recomputed no more."""
        module = self._groups.made(chosen) if isinstance(chosen, Span) else chosen
        call = None if module is None else self._chosen.get((module, False))
        return call is not None and call.deviated

    def of_policy(self, module: nn.Module) -> RecomputedModule:
        return RecomputedModule(self._core, module, self._whole, self.again)

    def choose(
        self,
        chosen: Collection[nn.Module | Span],
        device: torch.device | None,
        *,
        given: Collection[nn.Module] = (),
        pieces: Collection[nn.Module] = (),
    ) -> None:
        """From now on these modules and groups are recomputed if a second call on the device repeats the first.

        The given ones are recomputed without a trial: if a second call differs, it raises. The pieces are recomputed
        inside the chosen ones, whose trial is theirs.
        """
        groups = self._groups.choose([each for each in chosen if isinstance(each, Span)])
        outer = [*groups, *(each for each in chosen if isinstance(each, nn.Module)), *given]
        wanted = dict.fromkeys([*((module, False) for module in outer), *((module, True) for module in pieces)])
        for key, call in self._chosen.items():
            if key not in wanted:
                call.remove()
        for module, is_piece in wanted:
            if (module, is_piece) not in self._chosen:
                tried_on = None if is_piece or module in given else device
                self._chosen[module, is_piece] = RecomputedModule(
                    self._core, module, self._whole, self.again, tried_on=tried_on, is_piece=is_piece
                )
            self._chosen[module, is_piece].install(innermost=True)
        for module in outer:
            self._chosen[module, False].pieces = tuple(self._chosen[piece, True] for piece in pieces)


class _CheckedCall(RepeatableCall):
    """A repeatable call. Before the second one it raises if a buffer, or a parameter that is saved, has changed.

    Attributes:
        parameters: Parameters of the module, each with its version before the call.
        pieces: The modules that are recomputed inside, in the second call as in the first.
    """

    def __init__(
        self,
        owner: RecomputedModule,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        in_full: bool,
        in_one_piece: bool = False,
    ) -> None:
        hold = partial(_held, owner.core)
        super().__init__(owner.module, owner.call, args, kwargs, in_full=in_full, hold=hold)
        self._owner = owner
        self.pieces = () if in_one_piece else owner.pieces
        self._noted: list[tuple[RecomputedModule, list[tuple[Tensor, int]]]] | None = [] if in_one_piece else None
        self._count = len(self.tensors)
        self._kind = type(owner.module).__name__
        self.parameters = _versions(owner.module.parameters())

    def note(self, piece: RecomputedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module begins inside, which could be a piece."""
        if self._noted is not None:
            self._noted.append((piece, _versions(tensors_in((args, kwargs)))))

    def drop_unfit(self) -> None:
        """Modules whose arguments have been written to since they began are pieces no more."""
        for piece, versions in self._noted or ():
            piece.deviated |= any(_version(tensor) != version for tensor, version in versions)
        self._noted = None

    @not_traced
    def again(self, tensors: Sequence[Tensor]) -> Any:
        if self.has_stale_parameters or any(_version(buffer) != version for buffer, version in self.trusted):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation, or "
                f"replaced: a parameter or buffer of a {self._kind} that is called a second time in backward, after "
                "its first call"
            )
        self._owner.again.add()
        with ExitStack() as stack:
            for piece in self.pieces:  # others may be chosen by now
                if not any(call is piece for call in standing_in(piece.module)):
                    piece.install(innermost=True)
                    stack.callback(piece.remove)
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


def _digest(tensors: Iterable[Tensor]) -> _C.SavedDigest:
    digest = _C.SavedDigest([])
    for tensor in tensors:
        digest.add(tensor.detach())
    return digest


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _witness(module: nn.Module) -> list[Tensor]:
    """An empty tensor on the module's GPU: a checkpoint restores the random states of its tensors' GPUs only."""
    own = next(itertools.chain(module.parameters(), module.buffers()), None)
    return [] if own is None or own.device.type == "cpu" else [torch.empty(0, device=own.device)]
