"""How many microbatches make a round, and whether it keeps or recomputes activations, where the user left it open.

What is not known is tried with one microbatch: what it held at the end of its forward, and what it took beyond that at
the most. More microbatches hold as many times the first and take the second once. A round fits when that leaves room
for two of the largest blocks, one in use and one on its way. Keeping is chosen if all that was asked for fits.

A round that has run out of memory says more than any estimate: from then on rounds of its kind are at most half as
large, and of one microbatch there are none.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """The next round."""

    size: int
    recompute: bool


@dataclass(frozen=True)
class Measured:
    """Device bytes of activations: per microbatch, and once beside them."""

    held: int
    passing: int


class Choice:
    """Decides for one run, from what its rounds took.

    Args:
        budget: device bytes.
        largest_block: bytes of the largest block.
    """

    def __init__(self, budget: int, largest_block: int) -> None:
        self._room = budget - 2 * largest_block
        self._measured: dict[bool, Measured] = {}
        self._largest: dict[bool, int] = {}  # by recompute: of rounds, once one has run out of memory

    def next(self, left: int, *, size: int | None, recompute: bool | None) -> Decision:
        """The round to run when ``left`` microbatches are; ``size`` and ``recompute`` are what the user asked for."""
        wanted = min(size or left, left)
        if size is not None and recompute is not None:
            return Decision(wanted, recompute)
        modes = self._modes(recompute) or (recompute is True,)
        for mode in modes:
            most = wanted if size is not None else min(wanted, self._most(mode, wanted))
            if mode not in self._measured:
                return Decision(1, mode)
            if self._fitting(mode) >= most:
                return Decision(most, mode)
        # Of small blocks a repetition's own notes may take more than what they save.
        last = max(modes, key=lambda mode: (self._fitting(mode), -self._measured[mode].held))
        fitting = min(max(1, self._fitting(last)), self._most(last, wanted))
        return Decision(wanted if size is not None else fitting, last)

    def _most(self, mode: bool, wanted: int) -> int:
        return max(1, self._largest.get(mode, wanted))

    def fail(self, decision: Decision, *, recompute: bool | None) -> bool:
        """A round has run out of memory. Returns whether there is another one to try for the same microbatches."""
        self._largest[decision.recompute] = decision.size // 2
        if self._modes(recompute):
            return True
        self._largest.clear()  # no round would do: that says nothing about other microbatches
        return False

    def _modes(self, recompute: bool | None) -> tuple[bool, ...]:
        """Those in which one microbatch may fit, the faster one first."""
        asked = (False, True) if recompute is None else (recompute,)
        return tuple(mode for mode in asked if self._largest.get(mode) != 0)

    def learn(self, decision: Decision, *, held: int, peak: int) -> None:
        """A round has run: ``held`` bytes were there after its forward, ``peak`` at the most."""
        each = -(-held // decision.size)
        known = self._measured.get(decision.recompute, Measured(0, 0))
        passing = max(0, peak - held)
        self._measured[decision.recompute] = Measured(max(each, known.held), max(passing, known.passing))

    def _fitting(self, recompute: bool) -> int:
        measured = self._measured[recompute]
        return max(0, self._room - measured.passing) // max(1, measured.held)
