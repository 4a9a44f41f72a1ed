"""How many microbatches make a round, and whether it keeps or recomputes activations, where the user left it open.

What is not known is tried with one microbatch: what it held at the end of its forward, and what it took beyond that at
the most. More microbatches hold as many times the first and take the second once. A round fits when that leaves room
for two of the largest blocks, one in use and one on its way. Keeping is chosen if all that was asked for fits.
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

    def next(self, left: int, *, size: int | None, recompute: bool | None) -> Decision:
        """The round to run when ``left`` microbatches are; ``size`` and ``recompute`` are what the user asked for."""
        wanted = min(size or left, left)
        if size is not None and recompute is not None:
            return Decision(wanted, recompute)
        modes = (False, True) if recompute is None else (recompute,)
        for mode in modes:
            if mode not in self._measured:
                return Decision(1, mode)
            if self._fitting(mode) >= wanted:
                return Decision(wanted, mode)
        return Decision(wanted if size is not None else max(1, self._fitting(modes[-1])), modes[-1])

    def learn(self, decision: Decision, *, held: int, peak: int) -> None:
        """A round has run: ``held`` bytes were there after its forward, ``peak`` at the most."""
        each = -(-held // decision.size)
        known = self._measured.get(decision.recompute, Measured(0, 0))
        passing = max(0, peak - held)
        self._measured[decision.recompute] = Measured(max(each, known.held), max(passing, known.passing))

    def _fitting(self, recompute: bool) -> int:
        measured = self._measured[recompute]
        return max(0, self._room - measured.passing) // max(1, measured.held)
