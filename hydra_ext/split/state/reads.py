"""Finds the readers of certain attributes: for a while the objects have a class that reports each read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

Reader = tuple[str, int]  # "event" or "glue", and its number; the glue after an event has the event's


class Reads:
    """Collects every read of the watched attributes, except reads through ``__dict__``.

    Args:
        reader: Returns the event or glue that runs now.

    Attributes:
        found: Readers of each watched attribute, by the name that was given to :meth:`watch`.
    """

    def __init__(self, reader: Callable[[], Reader]) -> None:
        self.found: dict[str, set[Reader]] = {}
        self._reader = reader
        self._watched: dict[tuple[int, str], set[str]] = {}
        self._classes: dict[type, type] = {}
        self._told_of: dict[type, Any] = {}
        self._changed: dict[int, tuple[Any, type]] = {}
        self._of_classes: dict[tuple[type, str], str] = {}
        self._paused = False

    def watch(self, owner: Any, attribute: str, name: str) -> bool:
        """Watches an attribute of an object or class from now on; returns whether that is possible.

        It is possible for a class written in Python, and for objects of one.
        """
        if isinstance(owner, type):
            self._of_classes[owner, attribute] = name
            return self._tell_of(owner, attribute)
        if id(owner) not in self._changed:
            kind = type(owner)
            try:
                if _is_told_of_subclasses(kind):
                    self._tell(kind)
                else:
                    object.__setattr__(owner, "__class__", self._telling(kind))
            except (TypeError, ValueError, AttributeError):
                return False
            self._changed[id(owner)] = (owner, kind)
        self._watched.setdefault((id(owner), attribute), set()).add(name)
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, reads are not collected."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def watch_again(self) -> None:
        """Watches attributes of classes again: an assignment to one has removed its watch."""
        for kind, attribute in self._of_classes:
            self._tell_of(kind, attribute)

    def end(self) -> None:
        """Restores all objects and classes."""
        for owner, kind in self._changed.values():
            if type(owner) is not kind:
                object.__setattr__(owner, "__class__", kind)
        for kind, before in reversed(self._told_of.items()):
            if before is None:
                type.__delattr__(kind, "__getattribute__")
            else:
                type.__setattr__(kind, "__getattribute__", before)
        for kind, attribute in self._of_classes:
            held = vars(kind).get(attribute)
            if isinstance(held, _Telling):
                type.__setattr__(kind, attribute, held.value)

    def _tell_of(self, kind: type, attribute: str) -> bool:
        held = vars(kind).get(attribute)
        if attribute in vars(kind) and not isinstance(held, _Telling):
            name = self._of_classes[kind, attribute]
            try:
                type.__setattr__(kind, attribute, _Telling(held, lambda: self._note({name})))
            except TypeError:
                return False
        return True

    def _note(self, names: Iterable[str]) -> None:
        if not self._paused:
            for name in names:
                self.found.setdefault(name, set()).add(self._reader())

    def _tell(self, kind: type) -> None:
        """Makes the class itself report reads, for all its objects."""
        if kind not in self._told_of:
            before = vars(kind).get("__getattribute__")
            type.__setattr__(kind, "__getattribute__", self._read(kind.__getattribute__))
            self._told_of[kind] = before

    def _telling(self, kind: type) -> type:
        """A subclass of the class that reports reads."""
        if kind in self._classes:
            return self._classes[kind]
        # An object can only change to a class with the same layout: the subclass must add neither slots nor __dict__.
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__slots__": ()}
        self._classes[kind] = type(kind)(
            kind.__name__, (kind,), {**names, "__getattribute__": self._read(kind.__getattribute__)}
        )
        return self._classes[kind]

    def _read(self, get: Callable[..., Any]) -> Callable[[Any, str], Any]:
        def read(owner: Any, attribute: str) -> Any:
            self._note(self._watched.get((id(owner), attribute), ()))
            return get(owner, attribute)

        return read


def _is_told_of_subclasses(kind: type) -> bool:
    """Whether the user's code runs when a subclass is made. It might register the subclass, and so keep it."""
    return type(kind) is not type or any("__init_subclass__" in vars(base) for base in kind.__mro__[:-1])


class _Telling:
    """A descriptor in place of a class's attribute, which reports each read."""

    def __init__(self, value: Any, tell: Callable[[], None]) -> None:
        self.value = value
        self._tell = tell

    def __get__(self, _owner: Any, _kind: type | None = None) -> Any:
        self._tell()
        return self.value
