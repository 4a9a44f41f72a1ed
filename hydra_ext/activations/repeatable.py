"""Calls of modules that can be made a second time as they were made first.

What the first call changed is as it was when the second runs: the module's buffers and attributes, the containers among
the arguments (caches that a block appends to), and the random states of the process. What a module keeps elsewhere
cannot be known, and so what a repetition saves is compared with what the call saved, each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import _StopRecomputationError

from hydra_ext import _C
from hydra_ext.activations.call_state import CallState, Hold
from hydra_ext.errors import UnsupportedModel
from hydra_ext.state.arguments import Arguments, tensors_in
from hydra_ext.state.numbers import version_of
from hydra_ext.state.randomness import RandomState
from hydra_ext.tracing import not_traced

Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]
_saved_tensors_hooked = torch._C._autograd._top_saved_tensors_default_hooks


def as_it_is(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


class Deviation(UnsupportedModel):
    """A second call has saved, or given, something else than the first."""


class RepeatableCall:
    """``call(args, kwargs)``, which is to be made with ``tensors``: whatever repeats it keeps them.

    A repetition begins with the random states of torch, Python and numpy that the call began with, and leaves them
    where it found them; torch's are the checkpoint's to restore. What it saves for backward is compared with what the
    call saved, each tensor with all its numbers at their places, before any of it is used: the gradients of a
    checkpoint depend on nothing else of a repetition. The first three calls of a module are compared in full: what
    they give, too, for which a repetition runs to its end.

    Tensors that cannot be compared (sparse, nested, quantised, of a class of their own, libraries' notes in bytes) are
    kept, and not made again.

    Args:
        module: whose call it is.
        in_full: whether what it gives is compared, too.
        hold: keeps the tensors that the first call has changed on the module.

    Attributes:
        tensors: those among the arguments, until the first call.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        in_full: bool,
        hold: Hold = as_it_is,
    ) -> None:
        self._module = module
        self._call = call
        self._in_full = in_full
        self._hold = hold
        self._arguments = Arguments((args, kwargs))
        self.tensors, self._arguments.tensors = self._arguments.tensors, []
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._state: CallState | None = None
        self._random: RandomState | None = None
        self._saved = _C.SavedDigest([])
        self._given = self._saved
        self._writes_arguments = False

    @not_traced
    def __call__(self, *tensors: Tensor) -> Any:
        if self._first is None:
            return self.again(tensors)
        (args, kwargs), self._first = self._first, None
        self.tensors = []
        versions = list(map(version_of, tensors))
        state = CallState(self._module)
        self._random = RandomState(own=self._arguments.sources)
        self._saved = _C.SavedDigest([*self._module.parameters()])
        with added_to(self._saved):
            output = self._call(args, kwargs)
        self._writes_arguments = versions != list(map(version_of, tensors))
        if self._in_full:
            self._given = self._digest_of(output)
        state.drop_unchanged(self._hold)
        self._state = state
        return output

    @property
    def trusted(self) -> list[tuple[Tensor, int]]:
        """Buffers of the module that the second call uses as they are, and their versions after the first."""
        return [] if self._state is None else self._state.trusted

    @not_traced
    def again(self, tensors: Sequence[Tensor]) -> Any:
        """The second call, or a later one, with the same tensors: they have no graph there, and need gradients as
        they did.

        Raises:
            Deviation: it is not as the first one was.
        """
        if self._state is None or self._random is None:
            raise RuntimeError("a call is repeated that has not ended")
        if self._writes_arguments:  # they are no longer what the call began with, and others have them
            raise self.deviation()
        args, kwargs = self._arguments.filled([_by_itself(tensor) for tensor in tensors])
        saved = self._saved.fresh()
        try:
            with self._random.in_place(), self._state.in_place() as trace, added_to(saved, trace.note_saved):
                output = self._call(args, kwargs)
        except _StopRecomputationError:  # all is there that was saved
            self._check(saved, self._state)
            raise
        self._check(saved, self._state)
        if self._in_full:
            self._compare(self._digest_of(output), self._given)
        return output

    def _digest_of(self, output: Any) -> _C.SavedDigest:
        digest = self._saved.fresh()
        for tensor in tensors_in(output):
            digest.add(tensor)
        return digest

    def _check(self, saved: _C.SavedDigest, state: CallState) -> None:
        if state.escaped:
            raise self.deviation()
        self._compare(saved, self._saved)

    def _compare(self, now: _C.SavedDigest, first: _C.SavedDigest) -> None:
        if not now.equals(first):
            raise self.deviation()

    def deviation(self) -> Deviation:
        """What is raised where a repetition is not as the call was."""
        return Deviation(
            f"a {type(self._module).__name__} that is recomputed gives something else when it is called a second time: "
            "its forward changes, or reads, what is neither a buffer nor an attribute of its modules nor an argument"
        )


@dataclass(frozen=True)
class _Kept:
    """A tensor that is not made again."""

    tensor: Tensor


@contextmanager
def added_to(digest: _C.SavedDigest, note: Callable[[Tensor], None] = lambda _: None) -> Iterator[None]:
    """What is saved for backward meanwhile is noted, and added to the digest, before it goes where it would go."""
    hooks = _saved_tensors_hooked(True)
    if hooks is None or not torch.is_grad_enabled():
        yield
        return
    pack, unpack = hooks

    @not_traced
    def added(tensor: Tensor) -> Any:
        note(tensor)
        return pack(tensor) if digest.add(tensor) else _Kept(tensor.detach())

    @not_traced
    def unpacked(packed: Any) -> Tensor:
        return packed.tensor if type(packed) is _Kept else unpack(packed)

    with saved_tensors_hooks(added, unpacked):
        yield


def _by_itself(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
