"""Calls of modules that can be made a second time as they were made first.

What the first call changed is as it was when the second runs: the module's buffers and attributes, and the containers
among the arguments (caches that a block appends to). What a module keeps elsewhere cannot be known.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.activations.module_state import Hold, ModuleState
from hydra_ext.tracing import not_traced

Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]
Fingerprint = list[tuple[torch.Size, torch.dtype, int]]
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_it_is(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


class RepeatableCall:
    """``call(args, kwargs)``, which is to be made with ``tensors``: whoever repeats it keeps them.

    Args:
        module: whose call it is.
        hold: who keeps the tensors that the first call has changed on the module.

    Attributes:
        tensors: those among the arguments, until the first call.
    """

    def __init__(
        self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], hold: Hold = as_it_is
    ) -> None:
        self._module = module
        self._call = call
        self._hold = hold
        self._arguments, self.tensors = without_tensors((args, kwargs))
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._state: ModuleState | None = None

    @not_traced
    def __call__(self, *tensors: Tensor) -> Any:
        if self._first is None:
            return self.again(tensors)
        (args, kwargs), self._first = self._first, None
        self.tensors = []
        state = ModuleState(self._module)
        output = self._call(args, kwargs)
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
        they did."""
        if self._state is None:
            raise RuntimeError("a call is repeated that has not ended")
        args, kwargs = with_tensors(self._arguments, [_by_itself(tensor) for tensor in tensors])
        with self._state.in_place():
            return self._call(args, kwargs)


def _by_itself(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


class _Place:
    """Where a tensor was in nested arguments."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


@not_traced
def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from tensors_in(getattr(value, item.name, None))


def fingerprint(output: Any) -> Fingerprint:
    """Of every tensor in a call's output that has numbers at hand: its shape, and the sum of its bits."""
    found: Fingerprint = []
    for tensor in tensors_in(output):
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
            continue
        value = tensor.detach().resolve_conj().resolve_neg()
        value = (torch.view_as_real(value) if value.is_complex() else value).contiguous()
        bits = value.view(_INTEGERS[value.itemsize])
        found.append((tensor.shape, tensor.dtype, int(bits.sum(dtype=torch.int64))))
    return found


@not_traced
def without_tensors(value: Any) -> tuple[Any, list[Tensor]]:
    """The value with its containers copied, however deep, and its tensors, each once, which it has no more."""
    found: dict[int, _Place] = {}
    tensors: list[Tensor] = []

    def place(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        if id(part) not in found:
            found[id(part)] = _Place(len(tensors))
            tensors.append(part)
        return found[id(part)]

    return _copy(value, place, {}), tensors


@not_traced
def with_tensors(value: Any, tensors: Sequence[Tensor]) -> Any:
    """A copy of what :func:`without_tensors` gave, with tensors in their places."""
    return _copy(value, lambda part: tensors[part.number] if isinstance(part, _Place) else part, {})


@not_traced
def _copy(value: Any, shared: Callable[[Any], Any], known: dict[int, tuple[Any, Any]]) -> Any:
    """Containers are copied; for tensors, modules and torch's own objects ``shared`` says what takes their place."""
    if _is_shared(value):
        return shared(value)
    if id(value) in known:
        return known[id(value)][0]
    if isinstance(value, tuple):
        return _tuple_of(value, [_copy(part, shared, known) for part in value])
    made = copy.copy(value)
    known[id(value)] = (made, value)  # the original is held so that no other object takes its identity
    if isinstance(value, list):
        made[:] = [_copy(part, shared, known) for part in value]
    elif isinstance(value, dict):
        for key in value:
            dict.__setitem__(made, key, _copy(value[key], shared, known))
    if hasattr(value, "__dict__"):
        for key, part in value.__dict__.items():
            made.__dict__[key] = _copy(part, shared, known)
    return made


def _tuple_of(original: tuple[Any, ...], parts: list[Any]) -> tuple[Any, ...]:
    kind: Any = type(original)
    if all(part is before for part, before in zip(parts, original, strict=True)):
        return original
    # What C functions return, with names, cannot be made as other tuples are.
    made: tuple[Any, ...] = kind(parts) if hasattr(kind, "n_sequence_fields") else tuple.__new__(kind, parts)
    return made


def _is_shared(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    if isinstance(value, (list, dict, set, tuple)):
        return False
    return (
        not hasattr(value, "__dict__")
        or callable(value)
        or isinstance(value, (type, ModuleType))
        or type(value).__module__.partition(".")[0] == "torch"
    )
