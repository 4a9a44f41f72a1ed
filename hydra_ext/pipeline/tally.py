"""What a rank's time has gone to, and what it has counted on the way."""

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
"""What computes, and what it may have to wait for first."""


class Waiting:
    """What the action that runs has waited for what had to arrive.

    Attributes:
        seconds: of the last wait; the executor sets it to zero before each action.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """An action waits once at most."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds = time.perf_counter() - start


class Tally:
    """Of one rank, since its beginning. Seconds of the host; owned by the thread that makes the steps.

    Attributes:
        updates: made, those that were skipped left out.
        updates_behind: among them, of all stages while other actions ran.
        skipped_updates: since their norm was not finite.
        computing_seconds: in forwards, backwards and updates (not those behind), without what they waited.
        waited_seconds: by what was waited for.
        peak_in_flight: by stage: microbatches between their forward and their backward, at most.
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
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)  # seconds, and those computing among them
        self._computing_before = 0.0

    def count_action(self, action: Action, seconds: float, waited: float) -> None:
        """One that has ended."""
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
        """Of all actions of a step, a drain or an evaluation."""
        self._recent.append((seconds, self.computing_seconds - self._computing_before))
        self._computing_before = self.computing_seconds

    def count_loss_wait(self, seconds: float) -> None:
        """Between two steps."""
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
        """The part of the last steps, and of waits for their losses, in which nothing was computed; 0 before any."""
        seconds = sum(each for each, _ in self._recent)
        return 1.0 - sum(each for _, each in self._recent) / seconds if seconds else 0.0


def _longer(step: tuple[float, float], seconds: float) -> tuple[float, float]:
    return step[0] + seconds, step[1]
