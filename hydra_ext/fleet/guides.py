"""Guides: rules that stop jobs which fall behind, and searches that propose jobs while others run."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from hydra_ext.errors import InvalidArgument
from hydra_ext.fleet.job import Job
from hydra_ext.fleet.results import JobResult


class Guide:
    """Hears every step of a fleet's jobs, in the order in which the fleet hears of them.

    Which jobs are stopped may depend on this order, and so on speeds; the numbers of each job do not. When a fleet
    resumes, a new guide hears all that has happened before it is asked anything.
    """

    def propose(self, running: int) -> Sequence[Job]:
        """Jobs to begin now; called about twice a second.

        Args:
            running: Number of jobs that have not ended, those included that wait for their trials.
        """
        return ()

    def stops(self, job: str, step: int, loss: float) -> bool:
        """Whether to stop a job behind a step: it saves a checkpoint, and can be restarted.

        Args:
            step: Steps made, from 1 on; after a failure some of them come again.
        """
        return False

    def ended(self, result: JobResult) -> None:
        """Hears that a job is done, was stopped, or was set aside."""


class SuccessiveHalving(Guide):
    """Asynchronous successive halving: at each rung the worse jobs are stopped.

    Rungs are at ``first``, ``first * factor``, ``first * factor**2``, ... steps. A job is judged there by the mean of
    its last losses, and goes on if it is among the best 1/``factor`` of those that have come to the rung so far.

    Source: ASHA (Li et al., MLSys 2020, arXiv:1810.05934), in the form that stops jobs instead of pausing them.

    Args:
        first: Steps of the first rung.
        factor: One job in so many goes on.
        window: Number of losses whose mean counts.

    Raises:
        InvalidArgument: A number is too small.
    """

    def __init__(self, *, first: int, factor: int = 3, window: int = 5) -> None:
        for name, value, least in (("first", first, 1), ("factor", factor, 2), ("window", window, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidArgument(f"{name}={value!r}: give a whole number of at least {least}")
        self._first = first
        self._factor = factor
        self._window = window
        self._recent: dict[str, deque[float]] = {}
        self._rungs: dict[int, dict[str, float]] = {}

    def stops(self, job: str, step: int, loss: float) -> bool:
        recent = self._recent.setdefault(job, deque(maxlen=self._window))
        recent.append(loss)
        if not self._is_rung(step):
            return False
        rung = self._rungs.setdefault(step, {})
        mean = statistics.fmean(recent)
        rung[job] = mean if math.isfinite(mean) else math.inf
        best = sorted(rung.values())[: max(1, len(rung) // self._factor)]
        return rung[job] > best[-1]

    def _is_rung(self, step: int) -> bool:
        rung = self._first
        while rung < step:
            rung *= self._factor
        return rung == step


class MedianStopping(Guide):
    """Stops a job whose best loss is worse than the median of the others' means up to the same step.

    Source: Golovin et al., KDD 2017, section 3.2.2.

    Args:
        grace: Steps that every job makes.
        least: Number of other jobs that must have come as far.

    Raises:
        InvalidArgument: A number is too small.
    """

    def __init__(self, *, grace: int, least: int = 3) -> None:
        for name, value in (("grace", grace), ("least", least)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidArgument(f"{name}={value!r}: give a whole number of at least 1")
        self._grace = grace
        self._least = least
        self._losses: dict[str, dict[int, float]] = {}

    def stops(self, job: str, step: int, loss: float) -> bool:
        own = self._losses.setdefault(job, {})
        own[step] = loss if math.isfinite(loss) else math.inf
        if step < self._grace:
            return False
        means = [
            statistics.fmean(value for at, value in losses.items() if at <= step)
            for name, losses in self._losses.items()
            if name != job and step in losses
        ]
        return len(means) >= self._least and min(own.values()) > statistics.median(means)
