"""Interleaved runs, medians, and the spread of identical runs: what every benchmark here reports."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """One thing measured against a reference, run by turns in one process.

    Attributes:
        reference_seconds, subject_seconds: medians.
        ratio: median over the rounds of subject / reference of the same round.
        spread: half the interquartile range of the ratio of two identical reference runs of the same round.
        rounds: how many.
    """

    reference_seconds: float
    subject_seconds: float
    ratio: float
    spread: float
    rounds: int

    def verdict(self, *, margin: float, holds: bool) -> str:
        """``margin``: how far the goal is from 1, as a ratio. Void where noise alone could decide."""
        return verdict(self.spread, margin=margin, holds=holds)


def verdict(spread: float, *, margin: float, holds: bool) -> str:
    """See :meth:`Comparison.verdict`."""
    if spread > margin / 2:
        return f"VOID: identical runs differ by {spread:.2%}, more than half the margin of {margin:.0%}"
    return "holds" if holds else "MISSED"


def timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(reference: Callable[[], None], subject: Callable[[], None], *, rounds: int, warm_up: int = 2) -> Comparison:
    """Runs reference, subject, reference by turns; the two references of a round give the spread."""
    for _ in range(warm_up):
        reference()
        subject()
    before, between, after = [], [], []
    for _ in range(rounds):
        before.append(timed(reference))
        between.append(timed(subject))
        after.append(timed(reference))
    null = [b / a for a, b in zip(before, after, strict=True)]
    low, _, high = statistics.quantiles(null, n=4)
    return Comparison(
        reference_seconds=statistics.median(before + after),
        subject_seconds=statistics.median(between),
        ratio=statistics.median(s / ((a + b) / 2) for a, s, b in zip(before, between, after, strict=True)),
        spread=(high - low) / 2,
        rounds=rounds,
    )


@dataclass(frozen=True)
class Series:
    """Several things run by turns: seconds of every round, by name."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def speed(self, subject: str, reference: str) -> float:
        """How often as fast as the reference: the median over the rounds."""
        return statistics.median(r / s for s, r in zip(self.seconds[subject], self.seconds[reference], strict=True))

    def spread(self, name: str, twin: str) -> float:
        """Half the interquartile range of the ratio of two identical runs of the same round."""
        low, _, high = statistics.quantiles(
            (a / b for a, b in zip(self.seconds[name], self.seconds[twin], strict=True)), n=4
        )
        return (high - low) / 2


def by_turns(runs: Mapping[str, Callable[[], None]], *, rounds: int, warm_up: int = 2, shortest_of: int = 1) -> Series:
    """Every round gives all of them a turn, in the order given.

    The seconds of a turn are those of the shortest of ``shortest_of`` runs: what else the machine does makes a run
    longer and never shorter.
    """
    for _ in range(warm_up):
        for run in runs.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(min(timed(run) for _ in range(shortest_of)))
    return Series(seconds)
