"""The state that a forward reads besides parameters, as it was before a call, so that a second call computes the same.

Batch statistics are written without a new version. So small buffers always count as changed; for large buffers the
version decides.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext import _C
from hydra_ext.state.contents import (
    ATTRIBUTES,
    FIXED,
    ITERATOR,
    LEAVES,
    MAPPING,
    OF_EVERY_MODULE,
    SEQUENCE,
    SET,
    Kind,
    classes_of,
    kinds_of,
    mapped_tuple,
)
from hydra_ext.state.iterators import independent_copy, is_iterator
from hydra_ext.state.layout import Layout, copied
from hydra_ext.state.memory import storage_key
from hydra_ext.state.numbers import (
    clone,
    differ,
    has_plain_numbers,
    is_small,
    may_have_changed,
    on_host,
    put,
    version_of,
)
from hydra_ext.state.snapshot import Snapshot

_ABSENT: Any = object()
_PLAIN = (bool, int, float, str)
_OWN = frozenset({"_parameters", "_buffers", "_modules"})
_WITH_MEMBERS = (MAPPING, SEQUENCE, SET, ATTRIBUTES)  # kinds whose members can be replaced
_WITHOUT_CONTENT = (FIXED, ITERATOR)

Hold = Callable[[Tensor], Callable[[], Tensor]]  # stores a tensor; the function that it returns fetches the tensor
Names = dict[str, Any]  # a module's attributes, or its buffers


class _OfThread(threading.local):
    """What a thread has. Attributes of the class are read many times faster than ones that may be missing."""

    repetitions = 0


_thread = _OfThread()


def is_repeating() -> bool:
    """Whether this thread repeats a call. What it sets during the repetition is undone afterwards."""
    return _thread.repetitions > 0


@dataclass(frozen=True)
class _Before:
    """The whole state before the first call; kept until that call has ended."""

    names: list[tuple[Names, Names]]  # the dictionary itself, and its copy
    contents: Snapshot
    buffers: list[tuple[Tensor, int, Tensor]]  # with versions and copies
    others: list[tuple[Tensor, int, Tensor | None]]  # likewise; None for a tensor too large to copy


@dataclass(frozen=True)
class _Found:
    """The part of that state that has to be restored for the second call."""

    names: list[tuple[Names, str, Any]] = field(default_factory=list)
    entries: list[tuple[Kind, Any, Any]] = field(default_factory=list)
    tensors_inside: list[tuple[Kind, Any, Any]] = field(default_factory=list)
    values: list[tuple[Tensor, Callable[[], Tensor]]] = field(default_factory=list)
    written: list[Tensor] = field(default_factory=list)


class CallState:
    """The state that a module's forward reads besides parameters and arguments, captured by the constructor.

    The state is everything that the attributes of the module and of its submodules lead to, at any depth. It includes
    numbers, containers, objects and data of their classes, arrays, tensors, iterators, and generators of random
    numbers. A second call sees the same state as the first call, and leaves no trace in it. It gets copies of tensors
    and iterators, so graphs that have saved the originals keep their numbers. All other state is restored afterwards.

    The second call sees some objects in their current state:

    - hooks and functions;
    - large tensors that are not buffers;
    - tensors of attributes and containers that no call of the module has replaced.

    Attributes:
        trusted: Buffers that are not copied, with their versions.
        escaped: Whether the last repetition changed state that cannot be restored, or tensors of the original state
            that it had saved for backward.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [*module.modules()]
        self._classes = [*dict.fromkeys(kind for inner in self._modules for kind in classes_of(type(inner)))]
        self._held: list[Names] = [names for inner in self._modules for names in (inner.__dict__, inner._buffers)]
        names = [(names, dict(names)) for names in self._held]
        contents = Snapshot(
            *(value for held, _ in names[::2] for name, value in held.items() if name not in OF_EVERY_MODULE),
            *self._classes,
            apart=self._modules,
        )
        # Large buffers of packed numbers are taken for weights. A second call that finds others in them is refused.
        own = (buffer for buffer in module.buffers() if not _C.is_face(buffer))
        buffers = [(buffer, version_of(buffer), copied(buffer)) for buffer in own]
        known = {id(buffer) for buffer, _, _ in buffers}
        others = [
            (tensor, tensor._version, copied(tensor) if is_small(tensor) else None)
            for tensor in {id(tensor): tensor for tensor in contents.tensors}.values()
            if id(tensor) not in known and _is_state(tensor)
        ]
        self._before: _Before | None = _Before(names, contents, buffers, others)
        self._iterators = {
            id(held): (held, independent_copy(held)) for kind, held, _ in contents.entries if kind is ITERATOR
        }
        self._empty = contents.empty
        self._found = _Found()
        self.trusted: list[tuple[Tensor, int]] = []
        self.escaped = False

    def drop_unchanged(self, hold: Hold) -> None:
        """Called after the first call: ``hold`` stores the tensors that the call changed; the others are dropped."""
        if self._before is None:
            return
        before, self._before, found = self._before, None, self._found
        for names, there in before.names:
            for name in there.keys() | names.keys():
                value = there.get(name, _ABSENT)
                if type(value) in LEAVES or isinstance(value, _PLAIN):
                    found.names.append((names, name, value))
                elif names.get(name, _ABSENT) is not value:
                    found.names.append((names, name, _held(value, hold) if isinstance(value, Tensor) else value))
                elif name not in OF_EVERY_MODULE and kinds_of(value):
                    found.names.append((names, name, value))
        for kind, held, saved in before.contents.entries:
            if kind in _WITHOUT_CONTENT:
                continue
            if kind in _WITH_MEMBERS and next(_tensors_among(kind.members(saved)), None) is not None:
                found.tensors_inside.append((kind, held, _kept(kind, held, saved, hold)))
            else:
                found.entries.append((kind, held, saved))
        for buffer, version, value in before.buffers:
            if may_have_changed(buffer, version):
                found.values.append((buffer, hold(value)))
            else:
                self.trusted.append((buffer, version))
        for tensor, version, copy in before.others:
            if tensor._version != version:
                found.written.append(tensor)
                if copy is not None:
                    found.values.append((tensor, hold(copy)))

    @contextmanager
    def in_place(self) -> Iterator[_Copies]:
        """Restores the captured state inside, and the current state afterwards.

        Yields the copies, whose ``note_saved`` has to be called with every tensor that is saved inside.
        """
        held_now = [(names, dict(names)) for names in self._held]
        of_entries = [held for entries in (self._found.entries, self._found.tensors_inside) for _, held, _ in entries]
        now = self._snapshot(*self._empty, *of_entries)
        copies = _Copies(self._found.written, self._iterators)
        _thread.repetitions += 1
        try:
            for tensor, noted in self._found.values:
                copies.take(tensor, _lying_as(tensor, noted()))
            self._put()
            if self._holds_tensors(now):
                copies.begin(self._held, self._snapshot())
            else:
                copies.begin(self._held[1::2], Snapshot())
            yield copies
        finally:
            _thread.repetitions -= 1
            for names, before in held_now:
                if type(names) is dict and names.keys() == before.keys():
                    names.update(before)
                else:
                    for name in [*names.keys(), *before]:
                        _set(names, name, before.get(name, _ABSENT))
            now.restore()
            self.escaped = copies.end()

    def _holds_tensors(self, now: Snapshot) -> bool:
        """Whether the modules hold tensors, or iterators, elsewhere than in buffers. Most modules do not."""
        if now.tensors or self._found.tensors_inside or self._iterators:
            return True
        return any(kind is ITERATOR for kind, _, _ in now.entries)

    def _snapshot(self, *others: Any) -> Snapshot:
        """A snapshot of all that can be reached now from the modules, their hooks included, and from ``others``."""
        values = (value for names in self._held[::2] for name, value in names.items() if name not in _OWN)
        return Snapshot(*values, *self._classes, *others, apart=self._modules)

    def _put(self) -> None:
        """Puts the state from before the first call into its places."""
        for names, name, value in self._found.names:
            _set(names, name, value.tensor() if isinstance(value, _Held) else value)
        for container in self._empty:
            if container:
                container.clear()
        for kind, held, saved in self._found.entries:
            kind.put(held, saved)
        for kind, held, saved in self._found.tensors_inside:
            with suppress(_GoneError):
                kind.put(held, kind.mapped(saved, _taken))


class _Copies:
    """Copies of tensors and iterators that take their places, for the second call to write to.

    Originals that the call reaches all the same, such as by a closure, are restored afterwards.

    Args:
        written: Tensors that the first call has written to. Other tensors are copied only if they are small.
        iterators: Iterators from before the first call, with copies from then.
    """

    def __init__(self, written: list[Tensor], iterators: dict[int, tuple[Any, Any]]) -> None:
        self._written = {id(tensor) for tensor in written}
        self._iterators = iterators
        self._known: dict[int, tuple[Any, Any]] = {}  # keeps the original, so that no other object gets its identity
        self._originals: list[_Original] = []
        self._there: Snapshot | None = None
        self._memory: set[int] = set()  # storage keys of the originals
        self._saved: set[int] = set()  # keys among them that the call has saved for backward

    def take(self, original: Tensor, made: Tensor) -> None:
        self._known[id(original)] = original, made
        self._originals.append(_Original.of(original, copies=True))

    def begin(self, held: list[Names], there: Snapshot) -> None:
        """Puts the copies into their places. Called when the state is restored, right before the second call.

        Args:
            held: Attributes and buffers of the modules, by name.
            there: Snapshot of all that can be reached from them; empty if they hold tensors only as buffers.
        """
        self._there = there
        for names in held:
            for name, value in names.items():
                if type(value) not in LEAVES and name not in _OWN:
                    _set(names, name, self._of(value))
        for kind, container, saved in there.entries:
            if kind in _WITH_MEMBERS and any(map(_is_copied, kind.members(saved))):
                kind.put(container, kind.mapped(saved, self._of))
        for tensor in there.tensors:
            if id(tensor) not in self._known and _is_state(tensor):  # it is in a place where no copy can replace it
                self._known[id(tensor)] = tensor, tensor
                self._originals.append(_Original.of(tensor, copies=is_small(tensor)))
        self._memory = {storage_key(original.tensor) for original in self._originals}

    def _of(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return mapped_tuple(value, self._of)
        if not _is_copied(value):
            return value
        if id(value) not in self._known:
            self._known[id(value)] = value, self._made(value)
        return self._known[id(value)][1]

    def _made(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            _, copy = self._iterators.get(id(value), (None, None))
            made = independent_copy(value if copy is None else copy)
            return value if made is None else made
        if not _is_state(value):
            return value
        copies = id(value) in self._written or is_small(value)
        # Of a large original only the version is watched: a second copy may be more than the device has room for.
        self._originals.append(_Original.of(value, copies=is_small(value)))
        return copied(value) if copies else value

    def note_saved(self, tensor: Tensor) -> None:
        """Notes that the second call saves this tensor for backward."""
        if self._memory and (memory := storage_key(tensor)) in self._memory:
            self._saved.add(memory)

    def end(self) -> bool:
        """Restores the originals after the second call. Returns whether one that it changed cannot be restored."""
        escaped = self._there is not None and bool(self._there.moved_iterators())
        for original in self._originals:
            if original.has_moved():
                # Restoring it would change the bytes that the call has saved for backward.
                saved = storage_key(original.tensor) in self._saved and original.differs()
                escaped = saved or not original.put() or escaped
        return escaped


@dataclass(frozen=True)
class _Original:
    """A tensor that the second call must not write to.

    Attributes:
        value: Copy on the host, which restores it if the call writes all the same; None if it is too large to copy.
    """

    tensor: Tensor
    version: int
    value: Tensor | None

    @staticmethod
    def of(tensor: Tensor, *, copies: bool) -> _Original:
        with _C.Uncharged():
            return _Original(tensor, version_of(tensor), on_host(tensor) if copies else None)

    def has_moved(self) -> bool:
        return version_of(self.tensor) != self.version or (is_small(self.tensor) and self.differs())

    def differs(self) -> bool:
        return self.value is not None and differ(self.tensor, self.value)

    def put(self) -> bool:
        """Restores the numbers and the version, so that graphs that have saved the tensor stay valid.

        Returns False if there is no copy.
        """
        if self.value is None:
            return False
        put(self.tensor, self.value)
        if not self.tensor.is_inference():
            torch._C._autograd._unsafe_set_version_counter((self.tensor,), (self.version,))
        return True


def _is_state(value: Any) -> bool:
    """Whether it is a tensor that a call may write to in place: a plain one, neither a weight nor with a graph."""
    return type(value) is Tensor and not value.requires_grad and not value.is_inference()


def _lying_as(buffer: Tensor, value: Tensor) -> Tensor:
    """A copy of the value with the buffer's layout in memory, so that results computed from it have the same bits.

    A buffer that has been resized since has another one.
    """
    alike = has_plain_numbers(buffer) and buffer.shape == value.shape
    return Layout.of(buffer).copy(value) if alike else clone(value)


@dataclass(frozen=True)
class _Held:
    tensor: Callable[[], Tensor]


def _held(value: Tensor, hold: Hold) -> _Held:
    if not value.requires_grad:
        return _Held(hold(value))
    # Without the graph that made it: the graph would keep the previous call's graph alive, and so on.
    taken = hold(value.detach())
    return _Held(lambda: taken().detach().requires_grad_())


class _GoneError(Exception):
    """A tensor that was held by a weak reference has been freed."""


def _kept(kind: Kind, held: Any, saved: Any, hold: Hold) -> Any:
    """The content with its tensors held. Tensors that are still in their places are not kept alive."""
    there = set(map(id, _tensors_among(kind.members(kind.save(held)))))

    def kept(value: Any) -> Any:
        if isinstance(value, tuple):
            return mapped_tuple(value, kept)
        if not isinstance(value, Tensor):
            return value
        return _Held(partial(_alive, weakref.ref(value))) if id(value) in there else _held(value, hold)

    return kind.mapped(saved, kept)


def _alive(reference: weakref.ReferenceType[Tensor]) -> Tensor:
    tensor = reference()
    if tensor is None:
        raise _GoneError
    return tensor


def _taken(value: Any) -> Any:
    if isinstance(value, tuple):
        return mapped_tuple(value, _taken)
    return value.tensor() if isinstance(value, _Held) else value


def _tensors_among(members: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors among the members, and in tuples among them at any depth."""
    for member in members:
        if isinstance(member, Tensor):
            yield member
        elif isinstance(member, tuple):
            yield from _tensors_among(member)


def _is_copied(value: Any) -> bool:
    """Whether a copy may take its place: a tensor, an iterator, or a tuple that may hold one."""
    return isinstance(value, (Tensor, tuple)) or (type(value) not in LEAVES and is_iterator(type(value)))


def _set(names: Names, name: str, value: Any) -> None:
    if value is _ABSENT:
        names.pop(name, None)
    elif names.get(name, _ABSENT) is not value:
        names[name] = value
