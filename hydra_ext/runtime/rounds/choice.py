"""Chooses the size of a round, and whether it keeps or recomputes activations, unless the user has.

A mode without a measurement is tried with one microbatch. The trial measures the bytes held at the end of its forward,
and the peak beyond them. A larger round needs the first figure for each microbatch and the second once. It fits if that
leaves room for two of the largest blocks, one in use and one on its way. Activations are kept if all microbatches that
the caller wants then fit.

A round that has run out of memory overrides the estimate: from then on rounds of its mode are at most half as large. A
mode in which one microbatch does not fit is not used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Decision:
    """The size and mode of the next round.

    Attributes:
        size: Number of its microbatches.
        recompute: Whether all blocks are recomputed.
        alone: Whether they run one after the other, each with its backward, and so in no round.
    """

    size: int
    recompute: bool
    alone: bool = False


class Chooser(Protocol):
    """Chooses rounds. ``size`` and ``recompute`` are the user's arguments."""

    def step_begins(self, nbytes: Sequence[int], *, size: int | None, recompute: bool | None) -> None:
        """A step begins whose microbatches have tensors of these bytes."""

    def next(self, left: int, *, size: int | None, recompute: bool | None) -> Decision:
        """The round to run when ``left`` microbatches remain."""

    def fail(self, decision: Decision, *, size: int | None, recompute: bool | None, looped: bool) -> str:
        """Notes that a round has run out of memory. Returns what was tried if nothing is left to try."""

    def learn(self, decision: Decision, *, held: int, peak: int) -> None:
        """Notes the activations of a round: ``held`` bytes after its forward, ``peak`` at most."""

    def step_ended(self) -> None:
        """A step has ended well."""


@dataclass(frozen=True)
class Measured:
    """Device bytes of activations: ``held`` for each microbatch, and ``passing`` once in addition."""

    held: int
    passing: int


class Choice:
    """Decides for one run, from measurements of its rounds.

    Args:
        budget: Device bytes.
        largest_block: Bytes of the largest block.
    """

    def __init__(self, budget: int, largest_block: int) -> None:
        self._room = budget - 2 * largest_block
        self._measured: dict[bool, Measured] = {}
        self._largest: dict[bool, int] = {}  # by recompute: largest round allowed, once one has run out of memory

    def step_begins(self, nbytes: Sequence[int], *, size: int | None, recompute: bool | None) -> None:
        pass

    def step_ended(self) -> None:
        pass

    def next(self, left: int, *, size: int | None, recompute: bool | None) -> Decision:
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
        # For small blocks the records that recomputation needs may take more memory than it saves.
        last = max(modes, key=lambda mode: (self._fitting(mode), -self._measured[mode].held))
        fitting = min(max(1, self._fitting(last)), self._most(last, wanted))
        return Decision(wanted if size is not None else fitting, last)

    def _most(self, mode: bool, wanted: int) -> int:
        return max(1, self._largest.get(mode, wanted))

    def fail(self, decision: Decision, *, size: int | None, recompute: bool | None, looped: bool) -> str:
        if size is not None:
            return f"round_size={size} was given, and so nothing else was tried."
        if looped:
            return "The microbatches were run one at a time."
        self._largest[decision.recompute] = decision.size // 2
        if self._modes(recompute):
            return ""
        self._largest.clear()  # other microbatches may be smaller
        kinds = {None: ", keeping activations and making them again", False: ", keeping activations"}
        tried = kinds.get(recompute, ", making activations again")
        return f"run.step tried rounds down to one microbatch{tried}."

    def _modes(self, recompute: bool | None) -> tuple[bool, ...]:
        """The modes in which one microbatch may fit, the faster one first."""
        asked = (False, True) if recompute is None else (recompute,)
        return tuple(mode for mode in asked if self._largest.get(mode) != 0)

    def learn(self, decision: Decision, *, held: int, peak: int) -> None:
        each = -(-held // decision.size)
        known = self._measured.get(decision.recompute, Measured(0, 0))
        passing = max(0, peak - held)
        self._measured[decision.recompute] = Measured(max(each, known.held), max(passing, known.passing))

    def _fitting(self, recompute: bool) -> int:
        measured = self._measured[recompute]
        return max(0, self._room - measured.passing) // max(1, measured.held)
