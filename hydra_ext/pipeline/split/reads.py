"""Who reads certain attributes: for a while their objects have a class that tells of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Reader = tuple[str, int]  # "event" or "glue", and its number; the glue after an event has the event's


class Reads:
    """Told of every read of the attributes that it watches, but for those through ``__dict__``.

    Attributes:
        found: by the name that the watch was given, who has read it.
    """

    def __init__(self, reader: Callable[[], Reader]) -> None:
        self.found: dict[str, set[Reader]] = {}
        self._reader = reader
        self._watched: dict[tuple[int, str], set[str]] = {}
        self._classes: dict[type, type] = {}
        self._changed: dict[int, tuple[Any, type]] = {}
        self._paused = False

    def watch(self, owner: Any, attribute: str, name: str) -> bool:
        """Whether the object allows it: one of a class that is written in Python does."""
        if id(owner) not in self._changed:
            kind = type(owner)
            try:
                object.__setattr__(owner, "__class__", self._telling(kind))
            except (TypeError, ValueError, AttributeError):
                return False
            self._changed[id(owner)] = (owner, kind)
        self._watched.setdefault((id(owner), attribute), set()).add(name)
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Reads inside do not count."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def end(self) -> None:
        for owner, kind in self._changed.values():
            object.__setattr__(owner, "__class__", kind)

    def _telling(self, kind: type) -> type:
        if kind in self._classes:
            return self._classes[kind]
        reads = self

        def read(owner: Any, attribute: str) -> Any:
            if not reads._paused:
                for name in reads._watched.get((id(owner), attribute), ()):
                    reads.found.setdefault(name, set()).add(reads._reader())
            return kind.__getattribute__(owner, attribute)  # type: ignore[call-arg]

        # Without slots of its own its objects are laid out as before, which a change of class needs.
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__slots__": ()}
        self._classes[kind] = type(kind)(kind.__name__, (kind,), {**names, "__getattribute__": read})
        return self._classes[kind]
