"""Whether what the microbatches of a round read and write on modules they do in the order of a loop.

Running statistics, and whatever else a call writes to in place, go from one call to the next: in a loop all calls of
a microbatch come before those of the next. In a round that is so of a site that each microbatch calls once, in turn,
and not of one that is called twice by each, or by some of them only later. Code around sites runs in several turns:
what it writes to is looked at after each, once it is known that it does.

What several modules hold is one thing, wherever it is written to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from hydra_ext.blocks import Site
from hydra_ext.runtime.rounds import fibers
from hydra_ext.runtime.rounds.undoing.accesses import Key
from hydra_ext.runtime.rounds.undoing.buffers import differs, note
from hydra_ext.runtime.rounds.undoing.holders import Holding
from hydra_ext.runtime.rounds.undoing.module_contents import ModuleContents


class Order:
    """That of the calls and reads of one round.

    Args:
        sites: of the model, by number.
        watched: what is looked at after each turn.

    Attributes:
        conflict: why the round cannot be equal to a loop; empty when nothing speaks against it.
    """

    def __init__(self, sites: Sequence[Site], watched: Iterable[Holding]) -> None:
        self._sites = sites
        self._events: list[tuple[int | Key, int]] = []  # a site called, or something read, and the microbatch
        self._watched = {holding: _Watched(holding) for holding in watched}
        self._watchers: dict[Key, list[_Watched]] = {}
        for holding, watched_one in self._watched.items():
            for key in holding:
                self._watchers.setdefault(key, []).append(watched_one)
        self.conflict = ""

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Around the turns of a forward."""
        with ExitStack() as stack:
            for watched in self._watched.values():
                stack.enter_context(watched.followed())
            yield

    def note_visit(self, place: int, index: int) -> None:
        self._events.append((place, index))

    def note_read(self, key: Key, index: int) -> None:
        event = key, index
        if not self._events or self._events[-1] != event:
            self._events.append(event)
        for watched in self._watchers.get(key, ()):
            watched.note_read(index)

    def end_turn(self, index: int, *, ended: bool) -> None:
        """
        Args:
            ended: the microbatch has no other turn.
        """
        for holding, watched in self._watched.items():
            if not watched.end_turn(index, ended=ended):
                self._refuse(holding)

    def unwatched(self, changed: Sequence[Holding]) -> list[Holding]:
        """After the forward: what has to be watched of this, which was written to. Of the rest it is known whether
        that was in order."""
        if not changed:
            return []
        within = {number: set(site.module.modules()) for number, site in enumerate(self._sites)}
        parts = {number for number in within if not self._has_sites(self._sites[number].module)}
        found = []
        for holding in changed:
            around = [{part for part in parts if module in within[part]} for module, _ in holding]
            if not all(around):
                found += [] if holding in self._watched else [holding]
                continue
            everywhere = frozenset[int]().union(*around)
            accesses = [index for what, index in self._events if what in everywhere or what in holding]
            if accesses != sorted(accesses):
                self._refuse(holding)
        return found

    def _has_sites(self, module: nn.Module) -> bool:
        """Inside it, beside itself."""
        inner = set(module.modules()) - {module}
        return any(site.module in inner for site in self._sites)

    def _refuse(self, holding: Holding) -> None:
        name = min(type(module).__name__ for module, _ in holding)
        self.conflict = f"they write to what a {name} holds in another order than a loop"


class _Watched:
    """What modules hold that are in no site, or around some.

    What a microbatch writes to, it may read until its calls of these modules have ended; where code outside of them
    writes, until the microbatch has. Nor may a later microbatch have read what an earlier one writes to only then.
    """

    def __init__(self, holding: Holding) -> None:
        self._holding = holding
        self._modules = {module for module, _ in holding}
        self._latest = -1  # of the microbatches that have written
        self._reached = -1  # of those that have read, or written
        self._calls: Counter[int] = Counter()  # under way, by microbatch
        self._called = self._read = False  # in this turn
        self._outside: set[int] = set()  # microbatches that have written outside their calls
        self._look()

    @contextmanager
    def followed(self) -> Iterator[None]:
        handles = [
            handle
            for module in self._modules
            for handle in (
                module.register_forward_pre_hook(lambda *_: self._step(1)),
                module.register_forward_hook(lambda *_: self._step(-1), always_call=True),
            )
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def note_read(self, index: int) -> None:
        self._read = True
        self._reached = max(self._reached, index)

    def end_turn(self, index: int, *, ended: bool) -> bool:
        """Whether a loop would have read and written in this order, as far as is known."""
        called = self._called or self._calls[index] > 0
        in_order = index >= self._latest or not (called or self._read)
        if self._is_written():
            before = [*self._outside, *(other for other, calls in self._calls.items() if calls > 0)]
            in_order = index >= max(self._latest, self._reached) and all(other >= index for other in before)
            self._latest = self._reached = max(self._latest, self._reached, index)
            if not called:
                self._outside.add(index)
            self._look()
        if ended:
            self._outside.discard(index)
        self._called = self._read = False
        return in_order

    def _look(self) -> None:
        self._contents = ModuleContents.of_keys(self._holding)
        self._buffers = [noted for noted in note([*self._modules]) if (noted.module, noted.name) in self._holding]

    def _is_written(self) -> bool:
        return any(map(differs, self._buffers)) or bool(self._contents.written())

    def _step(self, count: int) -> None:
        fiber: Any = fibers.current()
        if fiber is not None:
            self._called = True
            self._calls[fiber.index] += count
