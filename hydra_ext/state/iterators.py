"""Iterators: their position can be compared, but not set back. Some can be copied."""

from __future__ import annotations

import copy
import itertools
import re
import warnings
from collections.abc import Iterator
from types import GeneratorType
from typing import Any

from hydra_ext.state.foreign import for_each_class

# Iterators that hold an index of their own into a container, so that a copy is independent.
_COPIED = frozenset({type(iter([])), type(reversed([])), type(iter(())), type(iter("")), type(iter(range(0)))})
_COUNT = re.compile(r"count\((-?\d+)(?:, (-?\d+))?\)")
_SHOWN = (itertools.count, itertools.repeat)  # their repr tells the next value, or the number of values left


@for_each_class
def is_iterator(kind: type) -> bool:
    """Whether it is an iterator of Python's builtins or itertools; a file, for one, is not."""
    return kind.__module__ in ("builtins", "itertools") and issubclass(kind, Iterator)


def position(iterator: Any) -> Any:
    """A position that equals a later one if the iterator has not advanced. Positions that cannot be read are equal."""
    if isinstance(iterator, _SHOWN):
        return repr(iterator)
    if isinstance(iterator, GeneratorType):
        return _Frame(iterator)
    if hasattr(iterator, "__length_hint__"):
        return iterator.__length_hint__()
    return _Parts(iterator)


def parts(saved: Any) -> tuple[Any, ...]:
    """The user's iterators below an iterator such as ``zip``, at any depth, from its saved position."""
    return tuple(saved.users()) if isinstance(saved, _Parts) else ()


def independent_copy(iterator: Any) -> Any | None:
    """A copy that continues as the iterator does; None if there is no way to make one."""
    if type(iterator) in _COPIED:
        return copy.copy(iterator)
    counted = _COUNT.fullmatch(repr(iterator)) if type(iterator) is itertools.count else None
    return itertools.count(*(int(number) for number in counted.groups(default="1"))) if counted else None


class _Parts:
    """Position of an iterator around others (``zip``, ``map``, ``enumerate``, ``cycle``), from its pickled form.

    It keeps the parts of that form alive, so that an identity means one object.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns that iterators are pickled
            try:
                reduced: Any = iterator.__reduce__()
                self._held = list(_flat(reduced))
            except TypeError:  # its position cannot be read
                self._held = []
        self._at = [_told(part) for part in self._held]

    def users(self) -> Iterator[Any]:
        for part, told in zip(self._held, self._at, strict=True):
            if isinstance(told, _Parts):
                yield from told.users()
            elif isinstance(part, Iterator) and not is_iterator(type(part)):
                yield part

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Parts) and self._at == other._at

    def __hash__(self) -> int:
        return hash(len(self._at))


def _flat(value: tuple[Any, ...]) -> Iterator[Any]:
    for part in value:
        yield from _flat(part) if isinstance(part, tuple) else (part,)


def _told(part: Any) -> Any:
    if isinstance(part, int):
        return part
    return position(part) if is_iterator(type(part)) else id(part)


class _Frame:
    """Position of a generator. It keeps the generator's locals alive, so that an identity means one object."""

    def __init__(self, generator: GeneratorType[Any, Any, Any]) -> None:
        frame, inner = generator.gi_frame, generator.gi_yieldfrom
        self._held = list(frame.f_locals.values()) if frame is not None else []
        self._at = (
            frame.f_lasti if frame is not None else None,
            list(map(id, self._held)),
            position(inner) if inner is not None and is_iterator(type(inner)) else None,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Frame) and self._at == other._at

    def __hash__(self) -> int:
        return hash(self._at[0])
