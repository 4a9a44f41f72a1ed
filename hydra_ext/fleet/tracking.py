"""Where metrics go while a fleet runs: the user's trackers, and what tells them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """What hears of every step of a fleet. All calls come from the thread that runs the fleet.

    After a failure or a resume, steps since the job's checkpoint come again, with the same losses.
    """

    def job_step(self, job: str, step: int, loss: float, seconds: float) -> None:
        """A job has made a step, counted from 1 on."""

    def job_ended(self, job: str, *, is_done: bool, evaluation: float | None) -> None:
        """A job has made its last step, or was set aside.

        Args:
            evaluation: The mean loss over ``evaluate``'s microbatches; None without it.
        """

    def close(self) -> None:
        """The fleet has ended, in whatever way."""


class Told:
    """Tells trackers. One that raises is left out from then on: no job stops because of it."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def hear(self, job: str, record: Mapping[str, Any]) -> None:
        """Passes on a record of a job's progress file."""
        if record["event"] == "step":
            self._tell("job_step", job, int(record["step"]), float(record["loss"]), float(record["seconds"]))
        elif record["event"] == "done":
            self.job_ended(job, is_done=True, evaluation=record.get("evaluation"))

    def job_ended(self, job: str, *, is_done: bool, evaluation: float | None) -> None:
        self._tell("job_ended", job, is_done=is_done, evaluation=evaluation)

    def close(self) -> None:
        self._tell("close")

    def _tell(self, method: str, *given: Any, **named: Any) -> None:
        for tracker in list(self._trackers):
            try:
                getattr(tracker, method)(*given, **named)
            except Exception:  # the user's code: its failure is logged, and trainings go on
                self._trackers.remove(tracker)
                logger.warning("%r is left out from now on: %s() has failed", tracker, method, exc_info=True)
