"""A model's modules, or a microbatch, as they were: attributes, and all that is reached from them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hydra_ext.errors import SplitError
from hydra_ext.state.contents import ITERATOR, LEAVES, Kind, walk

_SIMPLE = {dict, OrderedDict, list, set, deque}


@contextmanager
def unchanged_modules(model: nn.Module) -> Iterator[None]:
    """Puts back afterwards what is set, replaced, added or removed in any module, and in whatever it holds.

    Raises:
        SplitError: an iterator there has gone on.
    """
    before = HeldBefore(model)
    try:
        yield
    finally:
        before.restore()
    before.refuse_iterators()


class HeldBefore:
    """What modules, or other things, hold, however deep, as it is now. What tensors hold is not looked at.

    Every microbatch pays for it, so that nothing is done for the many empty containers of a module but
    to remember them.
    """

    def __init__(self, *roots: Any) -> None:
        self._empty: list[Any] = []
        self._saved: list[tuple[Kind, Any, Any]] = []
        walk(roots, self._save)

    def _save(self, value: Any, kind: Kind) -> list[Any]:
        saved = kind.save(value)
        self._saved.append((kind, value, saved))
        rest = []
        for held in kind.members(saved):
            if type(held) in _SIMPLE and not held:
                self._empty.append(held)
            elif type(held) not in LEAVES:
                rest.append(held)
        return rest

    def restore(self) -> None:
        for empty in self._empty:
            if empty:
                empty.clear()
        for kind, held, saved in self._saved:
            kind.put(held, saved)

    def refuse_iterators(self) -> None:
        """
        Raises:
            SplitError: one has gone on since.
        """
        for kind, held, saved in self._saved:
            if kind is ITERATOR and kind.save(held) != saved:
                raise SplitError(
                    f"the forward takes from a {type(held).__name__} that a module holds, which a forward that does "
                    "not count cannot put back: count in a number instead, take what it gives outside of the model, "
                    "or give stages= explicitly"
                )
