"""What things hold, however deep, at one moment, to be put back in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from hydra_ext.state.contents import CONTAINERS, ITERATOR, LEAVES, Kind, has_changed, walk


class Snapshot:
    """What modules, or other things, hold, however deep, as it is now. What tensors hold is not looked at.

    Every microbatch pays for it, so that nothing is done for the many empty containers of a module but
    to remember them.

    Args:
        roots: the things.
        apart: others, which are left out.

    Attributes:
        tensors: that were met on the way.
        empty: containers that hold nothing.
        entries: of all other things: a kind, the thing, and what it holds.
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
        """Those that may hold something."""
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
        """Those that have gone on since: they stay where they are."""
        return [held for kind, held, saved in self.entries if kind is ITERATOR and has_changed(kind, held, saved)]
