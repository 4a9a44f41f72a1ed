"""Calls of modules that can be repeated with the state that the first call began with.

A repetition finds the module's buffers and attributes as they were, and the random states of the process. Containers
among the arguments, such as caches that a block appends to, are as before, too. State that a module keeps elsewhere is
unknown. So the tensors that a repetition saves are compared, each time, with those that the first call saved.

A repetition finds parameters as they are now, and what it writes to device parameters is undone. A parameter that the
call saved must not have changed since, as autograd demands without a repetition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import _StopRecomputationError

from hydra_ext import _C
from hydra_ext.activations.call_state import CallState, Hold
from hydra_ext.activations.functional import steps_aside
from hydra_ext.errors import UnsupportedModel
from hydra_ext.state.arguments import Arguments, tensors_in
from hydra_ext.state.memory import Places, moves_by_rows, storage_key
from hydra_ext.state.numbers import version_of
from hydra_ext.state.randomness import RandomState
from hydra_ext.tracing import not_traced, nothing_traced

Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]
_saved_tensors_hooked = torch._C._autograd._top_saved_tensors_default_hooks


def as_it_is(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


class Deviation(UnsupportedModel):
    """A second call has saved or returned something else than the first."""


class RepeatableCall:
    """``call(args, kwargs)``. It has to be called with ``tensors``, which the caller keeps for repetitions.

    A repetition begins with the call's random states of Python, numpy and the arguments' generators. Afterwards they
    are reset to their states before the repetition. The caller restores torch's states, as a checkpoint does.

    The tensors that a repetition saves for backward are compared with the call's before any of them is used. Compared
    are dtype, layout and every number at its place. The gradients of a checkpoint depend on nothing else of a
    repetition. With ``in_full`` the outputs are compared, too, and so a repetition runs to its end.

    Tensors that cannot be compared are kept from the first call. These are sparse, nested and quantised tensors,
    tensors of a class of their own, and rows of bytes, which may be a library's notes.

    Args:
        module: Module whose call it is.
        in_full: Whether outputs are compared, too.
        hold: Stores the tensors of the module that the first call has changed.

    Attributes:
        tensors: Tensors among the arguments; empty from the first call on.
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
        self._watched = _Watched(())

    @not_traced
    def __call__(self, *tensors: Tensor) -> Any:
        if self._first is None:
            return self.again(tensors)
        (args, kwargs), self._first = self._first, None
        self.tensors = []
        versions = list(map(version_of, tensors))
        state = CallState(self._module)
        self._random = RandomState(own=self._arguments.sources)
        parameters = [*self._module.parameters()]
        self._saved, self._watched = _C.SavedDigest(parameters), _Watched(parameters)
        with added_to(self._saved, self._watched.note, call=self):
            output = self._call(args, kwargs)
        self._watched.writes_arguments = versions != list(map(version_of, tensors))
        if self._in_full:
            self._given = self._digest_of(output)
        state.drop_unchanged(self._hold)
        self._state = state
        return output

    @property
    def trusted(self) -> list[tuple[Tensor, int]]:
        """Buffers of the module that the second call uses as they are, and their versions after the first."""
        return [] if self._state is None else self._state.trusted

    @property
    def has_stale_parameters(self) -> bool:
        """Whether a parameter that the first call saved was written to since, or replaced."""
        return self._watched.differ_from(self._module.parameters())

    @not_traced
    def again(self, tensors: Sequence[Tensor]) -> Any:
        """Makes the second call, or a later one, with the same tensors.

        The call gets the tensors without their graphs. They require gradients as before.

        Raises:
            Deviation: The call differs from the first one.
            UnsupportedModel: The first call has not ended.
        """
        if self._state is None or self._random is None:
            raise UnsupportedModel(
                f"the forward of a {type(self._module).__name__} that is recomputed goes backward through itself "
                "before it has ended, as torch.autograd.grad does: choose hydra_ext.Offload() or hydra_ext.Keep()"
            )
        # The first numbers of arguments that were written to are lost, and other code uses the new ones.
        if self._watched.writes_arguments or self.has_stale_parameters:
            raise self.deviation()
        args, kwargs = self._arguments.filled([_by_itself(tensor) for tensor in tensors])
        saved = self._saved.fresh()
        try:
            with (
                _parameters_kept(self._module),
                self._random.in_place(),
                self._state.in_place() as trace,
                added_to(saved, trace.note_saved, call=self),
            ):
                output = self._call(args, kwargs)
        except _StopRecomputationError:  # the checkpoint has all the tensors that it needs
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
        """The error to raise when a repetition differs from the call."""
        return Deviation(
            f"a {type(self._module).__name__} that is recomputed gives something else when it is called a second time: "
            "its forward reads or changes state that is neither a buffer nor an attribute of its modules nor an "
            "argument"
        )


class _Watched:
    """What a first call changes that a second one needs, and the parameters that it saves, with their versions then.

    Attributes:
        writes_arguments: Whether it has written to its arguments.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.writes_arguments = False
        self._own = {storage_key(parameter): parameter for parameter in parameters if not moves_by_rows(parameter)}
        self._saved: list[tuple[Tensor, int]] = []

    @nothing_traced
    def note(self, tensor: Tensor) -> None:
        """Notes that the call saves this tensor."""
        parameter = self._own.get(storage_key(tensor))
        if parameter is not None:
            self._saved.append((parameter, version_of(parameter)))

    def differ_from(self, parameters: Iterable[Tensor]) -> bool:
        there = {id(parameter) for parameter in parameters}
        return any(id(known) not in there or version_of(known) != version for known, version in self._saved)


@contextmanager
def _parameters_kept(module: nn.Module) -> Iterator[None]:
    """Writes to device parameters inside are undone."""
    places = Places(module.parameters())
    writes = _C.FaceWrites()
    try:
        with writes:
            yield
    finally:
        places.restore()
        writes.undo()


@dataclass(frozen=True)
class _Kept:
    """A saved tensor that cannot be compared, and so is kept from the first call."""

    tensor: Tensor


@contextmanager
def added_to(
    digest: _C.SavedDigest, note: Callable[[Tensor], None] = lambda _: None, *, call: object = None
) -> Iterator[None]:
    """Tensors that are saved for backward inside are noted and added to the digest, then passed to the outer hooks.

    The first of the new hooks has the call as its attribute.
    """
    hooks = _saved_tensors_hooked(True)
    if hooks is None or not torch.is_grad_enabled():
        yield
        return
    pack, unpack = hooks

    @steps_aside
    @not_traced
    def added(tensor: Tensor) -> Any:
        note(tensor)
        return pack(tensor) if digest.add(tensor) else _Kept(tensor.detach())

    @not_traced
    def unpacked(packed: Any) -> Tensor:
        return packed.tensor if type(packed) is _Kept else unpack(packed)

    hook: Any = added
    hook.call = call
    with saved_tensors_hooks(hook, unpacked):
        yield


def _by_itself(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
