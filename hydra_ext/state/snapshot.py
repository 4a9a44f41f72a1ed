"""What objects hold, at any depth, at one moment, so that it can be restored in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from hydra_ext.state.contents import CONTAINERS, ITERATOR, LEAVES, Kind, has_changed, walk


class Snapshot:
    """What modules or other objects hold, at any depth, when this is made. The numbers of tensors are not copied.

    A snapshot is taken for every microbatch, so the many empty containers of a module are only listed.

    Args:
        roots: Objects to start from.
        apart: Objects to leave out.

    Attributes:
        tensors: Tensors that were found.
        empty: Containers that hold nothing.
        entries: Kind, object and saved content of every other object.
    """

    def __init__(self, *roots: Any, apart: Iterable[Any] = ()) -> None:
        self.tensors: list[Tensor] = []
        self.empty: list[Any] = []
        self.entries: list[tuple[Kind, Any, Any]] = []
        walk(self._sorted(roots), self._save, apart)

    def _save(self, value: Any, kind: Kind) -> list[Any]:
        saved = kind.save(value)
        self.entries.append((kind, value, saved))
        return self._sorted(kind.members(saved))

    def _sorted(self, members: Iterable[Any]) -> list[Any]:
        """Lists tensors and empty containers; returns the other members that may hold something."""
        rest = []
        for held in members:
            if type(held) in CONTAINERS and not held:
                self.empty.append(held)
            elif isinstance(held, Tensor):
                self.tensors.append(held)
            elif type(held) not in LEAVES:
                rest.append(held)
        return rest

    def restore(self) -> None:
        for empty in self.empty:
            if empty:
                empty.clear()
        for kind, held, saved in self.entries:
            kind.put(held, saved)

    def moved_iterators(self) -> list[Any]:
        """Iterators that have advanced since the snapshot. They cannot be set back."""
        return [held for kind, held, saved in self.entries if kind is ITERATOR and has_changed(kind, held, saved)]
