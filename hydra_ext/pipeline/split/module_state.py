"""What modules hold beside parameters, at one moment: attributes, one level into their containers, and buffers."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.errors import SplitError
from hydra_ext.pipeline.layout import copied
from hydra_ext.pipeline.split.stand_ins import is_absent

Place = tuple[nn.Module, str, str]  # of which module, ATTRIBUTE or BUFFER, and its name
ATTRIBUTE, BUFFER = "attribute", "buffer"

_CONTAINERS = (dict, OrderedDict, list, set, deque)
# Forward hooks too: who hooks himself in at the first forward marks that in an attribute.
_HOOKS = {name for name in nn.Module().__dict__ if name.startswith(("_forward_hooks", "_forward_pre_hooks"))}
_OF_TORCH = frozenset(nn.Module().__dict__) - {"training"} - _HOOKS


@dataclass(frozen=True)
class Entry:
    """What is in one place.

    Attributes:
        content: a copy of the container that ``value`` is; None where it is none.
        stamp: equal for two entries of one place if nothing was set or written to between them.
    """

    value: Any
    content: Any
    stamp: Any

    @staticmethod
    def of(value: Any) -> Entry:
        if type(value) not in _CONTAINERS:
            return Entry(value, None, _stamp(value))
        content = value.copy()
        stamps = [_stamp(member) for member in _members(content)]
        return Entry(value, content, (id(value), frozenset(stamps) if isinstance(value, set) else tuple(stamps)))


class ModuleState:
    """What modules hold at one moment."""

    def __init__(self, roots: Sequence[nn.Module], entries: Mapping[Place, Entry]) -> None:
        self._roots = roots
        self.entries = dict(entries)

    @staticmethod
    def now(roots: Sequence[nn.Module]) -> ModuleState:
        entries: dict[Place, Entry] = {}
        for module in {inner: None for root in roots for inner in root.modules()}:
            if not isinstance(module, torch.jit.ScriptModule):
                for name, value in module.__dict__.items():
                    if name not in _OF_TORCH:
                        entries[module, ATTRIBUTE, name] = Entry.of(value)
            for name, buffer in module._buffers.items():
                entries[module, BUFFER, name] = Entry.of(buffer)
        return ModuleState(roots, entries)

    def put(self, current: ModuleState | None = None) -> None:
        """The modules hold this again.

        Args:
            current: what they hold, where the caller knows.
        """
        current = current or ModuleState.now(self._roots)
        for place in current.entries.keys() - self.entries.keys():
            del _holder(place)[place[2]]
        for place, entry in self.entries.items():
            there = current.entries.get(place)
            if there is None or there.value is not entry.value:
                value = entry.value.tensor() if isinstance(entry.value, _Computed) else entry.value
                _holder(place)[place[2]] = value
            if entry.content is not None:
                _refill(entry.value, entry.content)

    def changed_since(self, before: ModuleState) -> list[Place]:
        """Where something was set, written to, added or taken away."""
        places = self.entries.keys() | before.entries.keys()
        mine, other = self.entries.get, before.entries.get
        return [place for place in places if _stamp_of(mine(place)) != _stamp_of(other(place))]

    def copied(self, places: Collection[Place] | None = None) -> ModuleState:
        """With copies of the tensors in these places, or in all; what is one tensor in several places is one again."""
        copy = Copies()
        return ModuleState(
            self._roots,
            {
                place: copy.of(entry) if places is None or place in places else entry
                for place, entry in self.entries.items()
            },
        )


class Copies:
    """Entries with tensors of their own."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Tensor, Any]] = {}

    def of(self, entry: Entry) -> Entry:
        if entry.content is None:
            value = self._copy(entry.value)
            return entry if value is entry.value else Entry(value, None, _stamp(value))
        content = _mapped(entry.content, self._copy)
        return Entry(entry.value, content, entry.stamp)

    def _copy(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or is_absent(value):
            return value
        if id(value) not in self._made:
            made = copied(value) if value.grad_fn is None else _Computed(value)
            if isinstance(made, Tensor):
                made.requires_grad_(value.requires_grad)
            self._made[id(value)] = value, made
        return self._made[id(value)][1]


class _Computed:
    """A tensor with a graph, which must not be kept alive by who only looks back."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._data = tensor.detach()

    def tensor(self) -> Tensor:
        """Itself, or where it is gone one that is equal but has no way back."""
        tensor = self._tensor()
        if tensor is not None:
            return tensor
        with torch.enable_grad():
            made: Tensor = _Forgotten.apply(torch.zeros((), requires_grad=True), [self._data])  # type: ignore[no-untyped-call]
        return made


class _Forgotten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start: Tensor, tensors: list[Tensor]) -> Tensor:
        return tensors[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        raise SplitError(
            "a microbatch's loss depends with its graph on a tensor that another one left on a module, and the graph "
            "is gone: detach() what is left there"
        )


def _holder(place: Place) -> dict[str, Any]:
    module, kind, _ = place
    return module.__dict__ if kind == ATTRIBUTE else module._buffers


def _stamp(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), -1 if value.is_inference() else value._version
    return id(value)


def _stamp_of(entry: Entry | None) -> Any:
    return entry.stamp if entry is not None else None


def _members(content: Any) -> Iterable[Any]:
    if isinstance(content, dict):
        return [each for pair in content.items() for each in pair]
    members: Iterable[Any] = content
    return members


def _mapped(content: Any, copy: Callable[[Any], Any]) -> Any:
    if isinstance(content, dict):
        return {key: copy(value) for key, value in content.items()}
    return type(content)(copy(member) for member in content)


def _refill(container: Any, content: Any) -> None:
    content = _mapped(content, lambda member: member.tensor() if isinstance(member, _Computed) else member)
    there, wanted = list(_members(container)), list(_members(content))
    if len(there) == len(wanted) and all(one is other for one, other in zip(there, wanted, strict=True)):
        return
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(content)
    else:
        container.extend(content)
