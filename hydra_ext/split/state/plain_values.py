"""Snapshots of the plain values (numbers, flags, names) that can be reached from modules or arguments."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.split.rehearsal.record import PLAIN
from hydra_ext.split.state.held import Root, all_modules, class_roots, entries, is_object, members, module_roots
from hydra_ext.state.contents import (
    ATTRIBUTES,
    attributes_of,
    classes_of,
    comparable,
    data_of,
    has_state,
    kinds_of,
)
from hydra_ext.state.foreign import is_foreign


class PlainValues:
    """The plain values that can be reached from some roots, at one moment.

    The contents of arrays and the states of random sources count as values. Tensors do not: they are followed on their
    own.

    Attributes:
        entries: All entries that were reached, by their paths.
    """

    def __init__(self, roots: Sequence[Root]) -> None:
        self._roots = roots
        self._also: dict[int, set[int]] = {}
        self.entries = {entry.path: entry for entry in entries(roots, self._also)}
        self._values = {path: _plain(entry.holder, entry.value) for path, entry in self.entries.items()}

    def changed(self, later: PlainValues) -> list[str]:
        """The paths of the values that are different, absent or new in ``later``."""
        one, other = self._values, later._values
        return [path for path in dict.fromkeys((*one, *other)) if not _equal(one.get(path), other.get(path))]

    def roots_to(self, path: str) -> list[Root]:
        """The roots that lead to the entry of this path; none if there is no entry."""
        if path not in self.entries:
            return []
        number = self.entries[path].root
        return [self._roots[n] for n in sorted({number, *self._also.get(number, ())})]


class ModulesNow:
    """The plain values of a model. While nothing has changed, it returns the same snapshot again, which is faster."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = all_modules(model)
        self._classes = list(dict.fromkeys(kind for m in self._modules.values() for kind in classes_of(type(m))))
        self._contents: list[tuple[Any, list[Any]]] = []
        self._states: list[tuple[Any, Any]] = []
        self._latest: PlainValues | None = None

    def snapshot(self) -> PlainValues:
        if self._latest is None or not self._is_same():
            self._latest = PlainValues([*module_roots(self._modules), *class_roots(self._classes)])
            held = {id(entry.value): entry.value for entry in self._latest.entries.values()}
            holders = (*self._modules.values(), *self._classes, *held.values())
            self._contents = [(h, content) for h in holders if (content := _content(h)) is not None]
            self._states = [(h, comparable(h)) for h in held.values() if has_state(h)]
        return self._latest

    def _is_same(self) -> bool:
        return all(_has(holder, content) for holder, content in self._contents) and all(
            comparable(holder) == state for holder, state in self._states
        )


def _content(holder: Any) -> list[Any] | None:
    """The direct members of a holder; None for a value that can hold nothing."""
    if isinstance(holder, nn.Module):
        return list(holder.__dict__.values())
    if isinstance(holder, type):
        return list(data_of(holder).values()) if not is_foreign(holder) else None
    if isinstance(holder, dict):
        attributes = attributes_of(holder).values() if ATTRIBUTES in kinds_of(holder) else ()
        return [*holder.keys(), *holder.values(), *attributes]
    if isinstance(holder, (set, frozenset)):
        return list(holder)
    if isinstance(holder, (Tensor, *PLAIN)):
        return None
    inside = members(holder)
    return [member for _, _, member in inside] if inside is not None else None


def _has(holder: Any, content: list[Any]) -> bool:
    now = _content(holder)
    return now is not None and len(now) == len(content) and all(map(is_, now, content))


def _plain(holder: Any, value: Any) -> Any:
    """The value to compare. For another object in an attribute it is the type; for a member of a container, None."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, (set, frozenset)):
        return frozenset(member for member in value if isinstance(member, PLAIN))
    if has_state(value) and not isinstance(value, torch.Generator):  # draws from torch's generators are noted elsewhere
        return comparable(value)
    is_attribute = isinstance(holder, nn.Module) or is_object(holder)
    return type(value).__name__ if is_attribute and not isinstance(value, Tensor) else None


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))
