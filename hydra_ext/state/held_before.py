"""What things hold, however deep, at one moment, to be put back in place."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from hydra_ext.state.contents import ITERATOR, LEAVES, Kind, has_changed, walk

_SIMPLE = {dict, OrderedDict, defaultdict, Counter, list, set, deque}


class HeldBefore:
    """What modules, or other things, hold, however deep, as it is now. What tensors hold is not looked at.

    Every microbatch pays for it, so that nothing is done for the many empty containers of a module but
    to remember them.

    Args:
        roots: the things.
        apart: others, which are left out.

    Attributes:
        tensors: that were met on the way.
    """

    def __init__(self, *roots: Any, apart: Iterable[Any] = ()) -> None:
        self.tensors: list[Tensor] = [root for root in roots if isinstance(root, Tensor)]
        self._empty: list[Any] = []
        self._saved: list[tuple[Kind, Any, Any]] = []
        walk(roots, self._save, apart)

    def _save(self, value: Any, kind: Kind) -> list[Any]:
        saved = kind.save(value)
        self._saved.append((kind, value, saved))
        rest = []
        for held in kind.members(saved):
            if type(held) in _SIMPLE and not held:
                self._empty.append(held)
            elif isinstance(held, Tensor):
                self.tensors.append(held)
            elif type(held) not in LEAVES:
                rest.append(held)
        return rest

    def restore(self) -> None:
        for empty in self._empty:
            if empty:
                empty.clear()
        for kind, held, saved in self._saved:
            kind.put(held, saved)

    def moved_iterators(self) -> list[Any]:
        """Those that have gone on since: they stay where they are."""
        return [held for kind, held, saved in self._saved if kind is ITERATOR and has_changed(kind, held, saved)]
