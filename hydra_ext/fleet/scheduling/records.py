"""What the scheduler knows of each job: its state, its gang, and the seconds that it takes in each way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hydra_ext.fleet.scheduling.planning import Choice, Held, Work
from hydra_ext.fleet.scheduling.trials import Option

SHORTEST = 1e-6  # seconds: no job takes less


class JobState(str, Enum):
    WAITING = "waiting"
    RUNNING = "running"
    MOVING = "moving"  # saves and ends, to go on with another option
    STOPPING = "stopping"  # saves and ends, and does not go on
    DONE = "done"
    STOPPED = "stopped"
    SET_ASIDE = "set aside"  # failed too often


ENDED = (JobState.DONE, JobState.STOPPED, JobState.SET_ASIDE)


@dataclass
class Running:
    """A job's gang.

    Attributes:
        heard: When it has last told something, or has started.
        opened: Whether the model is built.
        stepped: Whether it has made a step.
        verdict: Why it was killed; empty if it was not.
        process: Number of the gang whose process it is in: its own, or that of one that it shares a device with.
    """

    gang: int
    option: int
    node: str
    devices: tuple[int, ...]
    process: int
    heard: float
    opened: bool = field(default=False, init=False)
    stepped: bool = field(default=False, init=False)
    verdict: str = field(default="", init=False)


@dataclass
class JobRecord:
    """What the fleet knows of a job.

    Attributes:
        job: As :meth:`hydra_ext.fleet.Job.describe` gives it.
        options: Ways to run it.
        folder: Of its checkpoints and progress.
        step: Steps made, as far as is known.
        saved: Steps of the newest checkpoint.
        state: What it does now.
        seconds: Of a step with each option, by what was seen in trials and since.
        failures: Messages of failures since the checkpoint before.
        evaluation: The result of ``evaluate``.
        running: Its gang; None if it has none.
        last_devices: Where its last gang has failed; None if it has not.
    """

    job: Mapping[str, Any]
    options: Sequence[Option]
    folder: str
    step: int = 0
    saved: int = 0
    state: JobState = field(default=JobState.WAITING, init=False)
    seconds: list[float] = field(init=False)
    failures: list[str] = field(default_factory=list, init=False)
    evaluation: float | None = field(default=None, init=False)
    running: Running | None = field(default=None, init=False)
    last_devices: tuple[str, tuple[int, ...]] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.take_options(self.options)

    def take_options(self, options: Sequence[Option]) -> None:
        """Takes the ways to run it, which trials have found."""
        self.options = options
        self.seconds = [option.step_s for option in options]

    @property
    def name(self) -> str:
        return str(self.job["name"])

    @property
    def left(self) -> int:
        """Steps that it has to make."""
        return max(0, int(self.job["steps"]) - self.step)

    def work(self, now: float, interval: float) -> Work:
        """The job for the planner: what is left of it.

        Args:
            interval: Seconds between checkpoints.
        """
        left, running = self.left, self.running
        if running is None:
            return Work(name=self.name, choices=[self._choice(each, left, interval) for each in self._numbers()])
        option, since = self.options[running.option], now - running.heard
        # Of what it does now: it opens, makes a step, or saves behind the last one.
        under_way = self.seconds[running.option] if left else option.save_s
        rest = max(0.0, (under_way if running.opened else option.open_s) - since)
        goes_on = self.state is JobState.RUNNING and not running.verdict
        leave = rest + option.save_s if left and not running.verdict else rest
        behind = left - 1 if running.opened and left else left
        choices = [self._choice(each, behind, interval) for each in self._numbers()]
        if goes_on:
            choices[running.option] = self._going_on(left, running, since, interval)
        return Work(
            name=self.name,
            choices=choices,
            held=Held(
                node=running.node,
                devices=len(running.devices),
                option=running.option if goes_on else None,
                leave=leave,
            ),
        )

    def _numbers(self) -> range:
        return range(len(self.options))

    def _choice(self, number: int, left: int, interval: float) -> Choice:
        """From a gang's start on."""
        option, step = self.options[number], self.seconds[number]
        seconds = option.open_s + left * step + option.save_s * _saves(left * step, step, interval)
        return Choice(devices=option.devices, seconds=max(seconds, SHORTEST))

    def _going_on(self, left: int, running: Running, since: float, interval: float) -> Choice:
        option, step = self.options[running.option], self.seconds[running.option]
        steps = left * step - (min(since, step) if running.opened and left else 0.0)
        opening = 0.0 if running.opened else max(0.0, option.open_s - since)
        saving = option.save_s * _saves(steps, step, interval) if left else max(0.0, option.save_s - since)
        return Choice(devices=option.devices, seconds=max(opening + steps + saving, SHORTEST))


def _saves(steps: float, step: float, interval: float) -> float:
    """Checkpoints in so many seconds of steps, and the last one; there is one between two steps at most."""
    return 1 + steps / max(interval, step)
