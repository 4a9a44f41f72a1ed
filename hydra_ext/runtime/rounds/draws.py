"""Checks that microbatches draw from shared generators in the order of a loop.

Shared generators are the global ones of Python and numpy, and those that modules hold: ``torch.Generator``,
``numpy.random.default_rng``, ``random.Random``. In a loop the second microbatch continues the first one's sequence. A
round does the same only if no microbatch draws after a later one has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hydra_ext.state.contents import comparable
from hydra_ext.state.randomness import RandomState


class DrawOrder:
    """The draws of a round's microbatches.

    Args:
        generators: Generators that modules hold.

    Attributes:
        turns: Largest number of turns in which one generator was drawn from.
        conflict: Description of a generator that was drawn from in another order than a loop; empty if there is none.
    """

    def __init__(self, generators: Iterable[Any] = ()) -> None:
        host = RandomState()
        self._sources = [_Source("Python's or numpy's random numbers", lambda: host.host_moved, host.capture)]
        self._sources += [_of_a_module(generator) for generator in generators]
        self.turns = 0
        self.conflict = ""

    def end_turn(self, index: int) -> None:
        for source in self._sources:
            if source.end_turn(index):
                self.turns = max(self.turns, source.turns)
                self.conflict = self.conflict or ("" if source.in_order else source.name)


class _Source:
    """One generator, or two that are checked together.

    Args:
        name: Description.
        moved: Function that says whether the state differs from the noted one.
        note: Function that notes the present state.
    """

    def __init__(self, name: str, moved: Callable[[], bool], note: Callable[[], None]) -> None:
        self.name = name
        self._moved = moved
        self._note = note
        self._latest = 0  # the last microbatch that has drawn, in the order of a loop
        self.turns = 0
        self.in_order = True

    def end_turn(self, index: int) -> bool:
        """Returns whether the turn drew from the generator."""
        if not self._moved():
            return False
        self._note()
        self.turns += 1
        self.in_order = self.in_order and index >= self._latest
        self._latest = max(index, self._latest)
        return True


def _of_a_module(generator: Any) -> _Source:
    noted = [comparable(generator)]

    def note() -> None:
        noted[0] = comparable(generator)

    return _Source(
        f"a {type(generator).__name__} that a module holds", lambda: bool(comparable(generator) != noted[0]), note
    )
