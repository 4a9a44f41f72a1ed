"""What a module has beside its parameters, as it was before a call: for a second call that is to give the same.

Batch statistics are written without a new version, so that small buffers are taken to have changed always; large ones
are trusted to their version.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.state.contents import ITERATOR, LEAVES, classes_of, kinds_of, mapped_tuple
from hydra_ext.state.held_before import HeldBefore
from hydra_ext.state.iterators import independent_copy
from hydra_ext.state.layout import Layout, copied
from hydra_ext.state.numbers import clone, differ, has_plain_numbers, is_small, may_have_changed, put, version_of
from hydra_ext.state.randomness import OwnRandomness

_ABSENT: Any = object()
_PLAIN = (bool, int, float, str, type(None))
_OWN = frozenset({"_parameters", "_buffers", "_modules"})
_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, Counter, list, deque, set})
_COPIED = _CONTAINERS | {Tensor}

Hold = Callable[[Tensor], Callable[[], Tensor]]  # keeps a tensor somewhere, and gives it back when it is asked for
Names = dict[str, Any]  # a module's attributes, or its buffers


_thread = threading.local()


def is_repeating() -> bool:
    """Whether this thread makes a call again: what it sets meanwhile is put back."""
    return bool(getattr(_thread, "repetitions", 0))


class ModuleState:
    """The buffers and attributes of a module, and of those inside it, as they are when this is made.

    Of attributes: what the call itself sets, all numbers, flags and texts, and the states of generators of random
    numbers. What is written to in place, tensors and containers, is another one for the second call, with what it has
    by then: that call leaves no trace in it, and graphs that have saved it keep their numbers.

    Attributes:
        trusted: buffers that are not copied, and their versions.
        escaped: whether the second call has written to what was to stay as it is, and cannot be put back.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [*module.modules()]
        self._held: list[Names] = [names for inner in self._modules for names in (inner.__dict__, inner._buffers)]
        self._before: list[tuple[Names, Names]] = [(names, dict(names)) for names in self._held]
        self._copies = [(buffer, version_of(buffer), copied(buffer)) for buffer in module.buffers()]
        values = [value for _, before in self._before for value in before.values()]
        self._generators = OwnRandomness(values)
        self._versions = [(value, value._version) for value in values if _is_state(value)]
        self._names: list[tuple[Names, str, Any]] = []
        self._values: list[tuple[Tensor, Callable[[], Tensor]]] = []
        self._written: list[Tensor] = []
        self.trusted: list[tuple[Tensor, int]] = []
        self.escaped = False

    def drop_unchanged(self, hold: Hold) -> None:
        """After the call: tensors that it has changed are held by ``hold``, the others are not kept."""
        for names, before in self._before:
            for name in before.keys() | names.keys():
                value = before.get(name, _ABSENT)
                if isinstance(value, _PLAIN):
                    self._names.append((names, name, value))
                elif names.get(name, _ABSENT) is not value:
                    self._names.append((names, name, _held(value, hold) if isinstance(value, Tensor) else value))
        for buffer, version, value in self._copies:
            if may_have_changed(buffer, version):
                self._values.append((buffer, hold(value)))
            else:
                self.trusted.append((buffer, version))
        self._written = [tensor for tensor, version in self._versions if tensor._version != version]
        self._before.clear()
        self._copies.clear()
        self._versions.clear()

    @contextmanager
    def in_place(self) -> Iterator[_Copies]:
        """The module is as noted meanwhile, and afterwards as it is now. Gives what is to be told of saved tensors."""
        generators_now = self._generators.now()
        held_now = [(names, dict(names)) for names in self._held]
        copies = _Copies(self._written, self._modules)
        for buffer, noted in self._values:
            copies.take(buffer, _lying_as(buffer, noted()))
        for names, name, value in self._names:
            _set(names, name, value.tensor() if isinstance(value, _Held) else value)
        for names in self._held:
            for name, value in names.items():
                if type(value) not in LEAVES and not isinstance(value, nn.Parameter) and name not in _OWN:
                    _set(names, name, copies.of(value))
        copies.begin()
        self._generators.restore()
        _thread.repetitions = getattr(_thread, "repetitions", 0) + 1
        try:
            yield copies
        finally:
            _thread.repetitions -= 1
            generators_now.restore()
            for names, now in held_now:
                if type(names) is dict and names.keys() == now.keys():
                    names.update(now)
                else:
                    for name in [*names.keys(), *now]:
                        _set(names, name, now.get(name, _ABSENT))
            self.escaped = copies.end()


class _Copies:
    """What the second call may write to: copies of tensors, containers and iterators, in their places. What else is
    reached, objects and what they hold, is put back afterwards, as are tensors that the call has reached all the same,
    by an object or a closure.

    Args:
        written: tensors that the first call has written to; of others only small ones are copied.
        modules: the module and those inside it.
    """

    def __init__(self, written: list[Tensor], modules: list[nn.Module]) -> None:
        self._written = {id(tensor) for tensor in written}
        self._modules = modules
        self._known: dict[int, tuple[Any, Any]] = {}  # with the original, so that no other object takes its identity
        self._originals: list[_Original] = []
        self._empty: list[Any] = []  # containers, most of them of hooks
        self._objects: list[Any] = []
        self._before: HeldBefore | None = None
        self._memory: set[int] = set()  # of the originals
        self._saved: set[int] = set()  # what of it the call has saved for backward

    def take(self, original: Tensor, made: Tensor) -> None:
        self._known[id(original)] = original, made
        self._originals.append(_Original.of(original, copies=True))

    def of(self, value: Any) -> Any:
        """In place of it: tensors and containers are copied, however deep, each once."""
        kind = type(value)
        if kind in _CONTAINERS and not value:
            self._empty.append(value)
        elif kind in _COPIED:
            if id(value) not in self._known:
                self._add(value)
            return self._known[id(value)][1]
        elif isinstance(value, tuple):
            return mapped_tuple(value, self.of)
        elif kind not in LEAVES:
            return self._of_object(value)
        return value

    def _of_object(self, value: Any) -> Any:
        if id(value) in self._known:
            return self._known[id(value)][1]
        kinds = kinds_of(value)
        copy = independent_copy(value) if ITERATOR in kinds else None
        if kinds and copy is None:
            self._objects.append(value)
        self._known[id(value)] = value, value if copy is None else copy
        return self._known[id(value)][1]

    def _add(self, value: Any) -> None:
        if isinstance(value, Tensor):
            copies = _is_state(value) and (id(value) in self._written or is_small(value))
            made = copied(value) if copies else value
            self._known[id(value)] = value, made
            if _is_state(value):
                self._originals.append(_Original.of(value, copies=copies))
            return
        made = value.copy()
        self._known[id(value)] = value, made
        if isinstance(value, (list, deque)):
            made.clear()
            made.extend(map(self.of, value))
        elif isinstance(value, dict):
            for key, inner in value.items():
                if not isinstance(inner, _PLAIN):
                    dict.__setitem__(made, key, self.of(inner))

    def begin(self) -> None:
        """All is there, and the second call follows."""
        classes = dict.fromkeys(kind for module in self._modules for kind in classes_of(type(module)))
        self._before = HeldBefore(*self._objects, *classes, apart=self._modules)
        for tensor in self._before.tensors:
            if id(tensor) not in self._known and _is_state(tensor):
                self._known[id(tensor)] = tensor, tensor
                self._originals.append(_Original.of(tensor, copies=is_small(tensor)))
        self._memory = {memory for original in self._originals if (memory := _memory_of(original.tensor)) is not None}

    def note_saved(self, tensor: Tensor) -> None:
        """The second call saves it for backward."""
        if self._memory:
            memory = _memory_of(tensor)
            if memory in self._memory and memory is not None:
                self._saved.add(memory)

    def end(self) -> bool:
        """After the second call: whether something that it has written to, or taken from, cannot be put back."""
        for container in self._empty:
            container.clear()
        escaped = False
        if self._before is not None:
            escaped = bool(self._before.moved_iterators())
            self._before.restore()
        for original in self._originals:
            if original.has_moved():
                # What the call has saved of it for backward must not change under it.
                saved = _memory_of(original.tensor) in self._saved and original.differs()
                escaped = saved or not original.put() or escaped
        return escaped


@dataclass(frozen=True)
class _Original:
    """A tensor that the second call is not to write to.

    Attributes:
        value: what is put back if it does all the same; None where it is too large for a copy.
    """

    tensor: Tensor
    version: int
    value: Tensor | None

    @staticmethod
    def of(tensor: Tensor, *, copies: bool) -> _Original:
        return _Original(tensor, version_of(tensor), clone(tensor) if copies else None)

    def has_moved(self) -> bool:
        return version_of(self.tensor) != self.version or (is_small(self.tensor) and self.differs())

    def differs(self) -> bool:
        return self.value is not None and differ(self.tensor, self.value)

    def put(self) -> bool:
        """Whether it is as before, for graphs that have saved it, too."""
        if self.value is None:
            return False
        put(self.tensor, self.value)
        if not self.tensor.is_inference():
            torch._C._autograd._unsafe_set_version_counter((self.tensor,), (self.version,))
        return True


def _memory_of(tensor: Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if has_plain_numbers(tensor) else None


def _is_state(value: Any) -> bool:
    """Whether it is a tensor that a call may write to in place, and neither a weight nor computed with a graph."""
    return type(value) is Tensor and not value.requires_grad and not value.is_inference()


def _lying_as(buffer: Tensor, value: Tensor) -> Tensor:
    """A copy of the value that lies in memory as the buffer does: what is computed from it has the same bits."""
    return Layout.of(buffer).copy(value) if has_plain_numbers(buffer) else clone(value)


@dataclass(frozen=True)
class _Held:
    tensor: Callable[[], Tensor]


def _held(value: Tensor, hold: Hold) -> _Held:
    if not value.requires_grad:
        return _Held(hold(value))
    # Not with the graph that made it: that would hold the one of the call before, and so on.
    taken = hold(value.detach())
    return _Held(lambda: taken().detach().requires_grad_())


def _set(names: Names, name: str, value: Any) -> None:
    if value is _ABSENT:
        names.pop(name, None)
    elif names.get(name, _ABSENT) is not value:
        names[name] = value
