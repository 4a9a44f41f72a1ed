"""Whether what the microbatches of a round write to on modules they write to in the order of a loop.

Running statistics, and whatever else a call writes to in place, go from one call to the next: in a loop all calls of
a microbatch come before those of the next. In a round that is so of a site that each microbatch calls once, in turn,
and not of one that is called twice by each, or by some of them only later. Code around sites runs in several turns:
what it writes to is looked at after each, once it is known that it does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from hydra_ext.blocks import Site
from hydra_ext.runtime.rounds import fibers
from hydra_ext.runtime.rounds.buffers import note, written
from hydra_ext.runtime.rounds.module_contents import ModuleContents


class Order:
    """That of the calls of one round.

    Args:
        sites: of the model, by number.
        watched: modules that are looked at after each turn.

    Attributes:
        conflict: why the round cannot be equal to a loop; empty when nothing speaks against it.
    """

    def __init__(self, sites: Sequence[Site], watched: Iterable[nn.Module]) -> None:
        self._sites = sites
        self._visits: list[tuple[int, int]] = []  # site, microbatch
        self._watched = {module: _Watched(module) for module in watched}
        self.conflict = ""

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Around the turns of a forward."""
        with ExitStack() as stack:
            for watched in self._watched.values():
                stack.enter_context(watched.followed())
            yield

    def note_visit(self, place: int, index: int) -> None:
        self._visits.append((place, index))

    def end_turn(self, index: int, *, ended: bool) -> None:
        """
        Args:
            ended: the microbatch has no other turn.
        """
        for module, watched in self._watched.items():
            if not watched.end_turn(index, ended=ended):
                self._refuse(module)

    def unwatched(self, changed: Sequence[nn.Module]) -> list[nn.Module]:
        """After the forward: those among these modules, which something was written to on, that have to be watched.
        Of the others it is known whether that was in order."""
        if not changed:
            return []
        within = {number: set(site.module.modules()) for number, site in enumerate(self._sites)}
        parts = {number for number in within if not self._has_sites(self._sites[number].module)}
        found = []
        for module in changed:
            around = parts & {number for number, modules in within.items() if module in modules}
            calls = [index for place, index in self._visits if place in around]
            if not around and module not in self._watched:
                found.append(module)
            elif calls != sorted(calls):
                self._refuse(module)
        return found

    def _has_sites(self, module: nn.Module) -> bool:
        """Inside it, beside itself."""
        inner = set(module.modules()) - {module}
        return any(site.module in inner for site in self._sites)

    def _refuse(self, module: nn.Module) -> None:
        self.conflict = f"they write to what a {type(module).__name__} holds in another order than a loop"


class _Watched:
    """A module that is in no site, or around some.

    What a microbatch writes to, it may read until its call of the module has ended; where code outside its calls
    writes, until the microbatch has.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._latest = -1  # of the microbatches that have written
        self._calls: Counter[int] = Counter()  # under way, by microbatch
        self._called = False  # in this turn
        self._outside: set[int] = set()  # microbatches that have written outside their calls
        self._look()

    @contextmanager
    def followed(self) -> Iterator[None]:
        handles = [
            self._module.register_forward_pre_hook(lambda *_: self._step(1)),
            self._module.register_forward_hook(lambda *_: self._step(-1), always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def end_turn(self, index: int, *, ended: bool) -> bool:
        """Whether a loop would have read and written in this order, as far as is known."""
        called = self._called or self._calls[index] > 0
        in_order = index >= self._latest or not called
        if self._is_written():
            before = [*self._outside, *(other for other, calls in self._calls.items() if calls > 0)]
            in_order = index >= self._latest and all(other >= index for other in before)
            self._latest = max(self._latest, index)
            if not called:
                self._outside.add(index)
            self._look()
        if ended:
            self._outside.discard(index)
        self._called = False
        return in_order

    def _look(self) -> None:
        self._contents = ModuleContents.of_each([self._module])
        self._buffers = note([self._module])

    def _is_written(self) -> bool:
        return bool(self._contents.written() or written(self._buffers, note([self._module])))

    def _step(self, count: int) -> None:
        fiber: Any = fibers.current()
        if fiber is not None:
            self._called = True
            self._calls[fiber.index] += count
