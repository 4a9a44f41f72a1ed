"""Time and event counts of one rank."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

from hydra_ext._C import Action, ActionKind

Cause = Literal["activations", "gradients", "reductions", "losses"]

RECENT = 16  # steps, drains and evaluations

WAITS: dict[ActionKind, Cause] = {
    ActionKind.FORWARD: "activations",
    ActionKind.BACKWARD: "gradients",
    ActionKind.UPDATE: "reductions",
}
"""The actions that compute, and what each may wait for first."""


class Waiting:
    """The time that the running action has waited for other ranks.

    Attributes:
        seconds: Seconds of the last wait. The executor sets them to zero before each action.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measures the body as the action's wait. An action waits at most once."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds = time.perf_counter() - start


class Tally:
    """Time and event counts of one rank since it started.

    Times are seconds of the host's clock. The thread that makes the steps owns it.

    Attributes:
        updates: Number of updates; skipped ones do not count.
        updates_behind: Number of these updates that every stage made while other actions ran.
        skipped_updates: Number of updates that were skipped because their norm was not finite.
        computing_seconds: Seconds in forwards, backwards and updates, without their waits, and without updates behind
            other actions.
        waited_seconds: Seconds of waits, by their causes.
        peak_in_flight: By stage, the largest number of microbatches between their forward and their backward.
    """

    def __init__(self, stages: Iterable[int]) -> None:
        self.updates = 0
        self.updates_behind = 0
        self.skipped_updates = 0
        self.computing_seconds = 0.0
        self.waited_seconds: dict[Cause, float] = {"activations": 0.0, "gradients": 0.0, "reductions": 0.0}
        self.waited_seconds["losses"] = 0.0
        self.peak_in_flight = dict.fromkeys(stages, 0)
        self._in_flight = dict(self.peak_in_flight)
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)  # all seconds, and seconds of computation
        self._computing_before = 0.0

    def count_action(self, action: Action, seconds: float, waited: float) -> None:
        """Counts an action that has ended."""
        cause = WAITS.get(action.kind)
        if cause is None:
            return
        self.computing_seconds += seconds - waited
        self.waited_seconds[cause] += waited
        stage = action.stage
        if action.kind == ActionKind.FORWARD and action.batch >= 0:  # an evaluation's has no backward
            self._in_flight[stage] += 1
            self.peak_in_flight[stage] = max(self.peak_in_flight[stage], self._in_flight[stage])
        elif action.kind == ActionKind.BACKWARD:
            self._in_flight[stage] -= 1

    def count_step(self, seconds: float) -> None:
        """Counts the seconds of a whole step, drain or evaluation."""
        self._recent.append((seconds, self.computing_seconds - self._computing_before))
        self._computing_before = self.computing_seconds

    def count_loss_wait(self, seconds: float) -> None:
        """Counts a wait for a loss, between two steps. It is added to the step before."""
        self.waited_seconds["losses"] += seconds
        self._recent.append((seconds, 0.0) if not self._recent else _longer(self._recent.pop(), seconds))

    def count_update(self, *, skipped: bool, behind: bool) -> None:
        if skipped:
            self.skipped_updates += 1
        else:
            self.updates += 1
            self.updates_behind += behind

    @property
    def bubble(self) -> float:
        """Fraction of the last steps, with the waits for their losses, without computation; 0 before the first."""
        seconds = sum(each for each, _ in self._recent)
        return 1.0 - sum(each for _, each in self._recent) / seconds if seconds else 0.0


def _longer(step: tuple[float, float], seconds: float) -> tuple[float, float]:
    return step[0] + seconds, step[1]
