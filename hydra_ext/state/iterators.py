"""Iterators: how far one has come can be seen, and not be set back; of some a copy can be made."""

from __future__ import annotations

import copy
import itertools
import re
import warnings
from collections.abc import Iterator
from types import GeneratorType
from typing import Any

from hydra_ext.state.foreign import for_each_class

# Which hold a place in what they go through, and go through nothing that another one does, too.
_COPIED = frozenset({type(iter([])), type(reversed([])), type(iter(())), type(iter("")), type(iter(range(0)))})
_COUNT = re.compile(r"count\((-?\d+)(?:, (-?\d+))?\)")
_SHOWN = (itertools.count, itertools.repeat)  # as text, with what comes next


@for_each_class
def is_iterator(kind: type) -> bool:
    """One of Python's own, but for those that are something else besides (a file)."""
    return kind.__module__ in ("builtins", "itertools") and issubclass(kind, Iterator)


def position(iterator: Any) -> Any:
    """Equal for one that has not gone on; two that cannot be told apart are equal, too."""
    if isinstance(iterator, _SHOWN):
        return repr(iterator)
    if isinstance(iterator, GeneratorType):
        return _Frame(iterator)
    if hasattr(iterator, "__length_hint__"):
        return iterator.__length_hint__()
    return _Parts(iterator)


def parts(saved: Any) -> tuple[Any, ...]:
    """Of a position: a user's iterators that one like ``zip`` goes through, at any depth."""
    return tuple(saved.users()) if isinstance(saved, _Parts) else ()


def independent_copy(iterator: Any) -> Any | None:
    """One that goes on as it does, where there is a way to make it."""
    if type(iterator) in _COPIED:
        return copy.copy(iterator)
    counted = _COUNT.fullmatch(repr(iterator)) if type(iterator) is itertools.count else None
    return itertools.count(*(int(number) for number in counted.groups(default="1"))) if counted else None


class _Parts:
    """Of an iterator around others (``zip``, ``map``, ``enumerate``, ``cycle``): what it would be pickled as.

    It holds what was there, so that an identity means one object.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12's, of pickling them
            try:
                reduced: Any = iterator.__reduce__()
                self._held = list(_flat(reduced))
            except TypeError:  # there is no way to tell how far it has come
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
    """Of a generator. It holds what was there, so that an identity means one object."""

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
