"""Checks that the microbatches of a round read and write state of modules in the order of a loop.

Running statistics, and other state that a call writes to in place, pass from one call to the next. In a loop all calls
of a microbatch come before those of the next. In a round this holds for a site that each microbatch calls once, in
turn. It does not hold for a site that each calls twice, or that some call only later. Code around sites runs in several
turns. Once it is known to write to some state, that state is checked after each turn.

An object that several modules hold counts as one, no matter which of them writes to it.
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
    """The order of the calls and reads of one round.

    Args:
        sites: Sites of the model, by number.
        watched: State that is checked after each turn.

    Attributes:
        conflict: Reason why the round cannot act as a loop; empty if there is none so far.
    """

    def __init__(self, sites: Sequence[Site], watched: Iterable[Holding]) -> None:
        self._sites = sites
        self._events: list[tuple[int | Key, int]] = []  # a call of a site, or a read of an attribute; the microbatch
        self._watched = {holding: _Watched(holding) for holding in watched}
        self._watchers: dict[Key, list[_Watched]] = {}
        for holding, watched_one in self._watched.items():
            for key in holding:
                self._watchers.setdefault(key, []).append(watched_one)
        self.conflict = ""

    @contextmanager
    def followed(self) -> Iterator[None]:
        """A context for the turns of a forward, in which calls of modules with watched state are counted."""
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
        """Checks the watched state after a turn.

        Args:
            index: Index of the microbatch.
            ended: Whether the microbatch has no further turn.
        """
        for holding, watched in self._watched.items():
            if not watched.end_turn(index, ended=ended):
                self._refuse(holding)

    def unwatched(self, changed: Sequence[Holding]) -> list[Holding]:
        """The state among ``changed`` that has to be watched, after a forward that has written to it.

        State of modules inside sites need not be watched: the noted calls and reads show whether it was written to in
        order. If it was not, the conflict is set.
        """
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
        """Whether the module contains a site other than itself."""
        inner = set(module.modules()) - {module}
        return any(site.module in inner for site in self._sites)

    def _refuse(self, holding: Holding) -> None:
        name = min(type(module).__name__ for module, _ in holding)
        self.conflict = f"they write to state of a {name} in another order than a loop"


class _Watched:
    """State of modules that are outside of sites, or that contain sites.

    After a microbatch has written to the state, it may read it again until its calls of these modules have ended. If
    code outside of these calls has written, it may until the microbatch has ended. A later microbatch must not write to
    the state before then. Nor may an earlier microbatch write to it after a later one has read it.
    """

    def __init__(self, holding: Holding) -> None:
        self._holding = holding
        self._modules = {module for module, _ in holding}
        self._latest = -1  # last microbatch, in the order of a loop, that has written
        self._reached = -1  # last microbatch, in the order of a loop, that has read or written
        self._calls: Counter[int] = Counter()  # calls under way, by microbatch
        self._called = self._read = False  # whether this turn has called the modules, or read the state
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
        """Returns whether a loop would have read and written in this order, as far as is known."""
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
