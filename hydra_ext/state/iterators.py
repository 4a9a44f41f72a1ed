"""Iterators: how far one has come can be seen, and not be set back; of some a copy can be made."""

from __future__ import annotations

import copy
import itertools
import re
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
    return iterator.__length_hint__() if hasattr(iterator, "__length_hint__") else None


def independent_copy(iterator: Any) -> Any | None:
    """One that goes on as it does, where there is a way to make it."""
    if type(iterator) in _COPIED:
        return copy.copy(iterator)
    counted = _COUNT.fullmatch(repr(iterator)) if type(iterator) is itertools.count else None
    return itertools.count(*(int(number) for number in counted.groups(default="1"))) if counted else None


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
