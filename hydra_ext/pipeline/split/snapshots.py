"""The plain values (numbers, flags, names) that can be reached from modules or arguments, at one time."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn

from hydra_ext.pipeline.split.held import Root, entries, is_object, members, module_roots
from hydra_ext.pipeline.split.record import PLAIN


class Snapshot:
    """Nothing of tensors, which are followed by themselves.

    Attributes:
        entries: all that was reached, by their paths.
    """

    def __init__(self, roots: Sequence[Root]) -> None:
        self._roots = roots
        self._also: dict[int, set[int]] = {}
        self.entries = {entry.path: entry for entry in entries(roots, self._also)}
        self._values = {path: _plain(entry.holder, entry.value) for path, entry in self.entries.items()}

    def changed(self, later: Snapshot) -> list[str]:
        """The paths of what is not the same later."""
        one, other = self._values, later._values
        return [path for path in dict.fromkeys((*one, *other)) if not _equal(one.get(path), other.get(path))]

    def roots_to(self, path: str) -> list[Root]:
        """Those that lead there, if it is there."""
        if path not in self.entries:
            return []
        number = self.entries[path].root
        return [self._roots[n] for n in sorted({number, *self._also.get(number, ())})]


class ModulesNow:
    """Snapshots of a model: the same object again while nothing has changed, which is quick to see."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._contents: list[tuple[Any, list[Any]]] = []
        self._latest: Snapshot | None = None

    def snapshot(self) -> Snapshot:
        if self._latest is None or not all(_has(holder, content) for holder, content in self._contents):
            self._latest = Snapshot(module_roots(self._modules))
            held = {id(entry.value): entry.value for entry in self._latest.entries.values()}
            holders = (*self._modules.values(), *held.values())
            self._contents = [(h, content) for h in holders if (content := _content(h)) is not None]
        return self._latest


def _content(holder: Any) -> list[Any] | None:
    """What lies in it itself; None for what can hold nothing."""
    if isinstance(holder, nn.Module):
        return list(holder.__dict__.values())
    if isinstance(holder, dict):
        return [*holder.keys(), *holder.values()]
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
    """The kind of what an attribute holds counts too; members of containers (a cache's) are only looked into."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, (set, frozenset)):
        return frozenset(member for member in value if isinstance(member, PLAIN))
    is_attribute = isinstance(holder, nn.Module) or is_object(holder)
    return type(value).__name__ if is_attribute and not isinstance(value, Tensor) else None


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))
