"""Iterators: how far one has come can be seen, and is not to be set back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import GeneratorType
from typing import Any

from hydra_ext.pipeline.split.foreign import for_each_class

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
