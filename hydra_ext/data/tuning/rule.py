"""The rule: more workers where items queue up in front and run out behind, kept if the consumer goes faster.

Occupancy says which stage to change, and hill climbing on the consumer's rate says whether the change was good. So what
workers take from the training itself counts, too. Rates differ from interval to interval for no reason. How much, is
measured, and a change is judged once its effect is clear beside that, or after some intervals. Workers that take cores
from each other need longer for an item. So from time to time the rule tries without those that the rate would not need
if items took the least time that was seen.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hydra_ext.data.tuning.views import STARVED, View

_GAIN = 0.01  # log of the rate's ratio, from which a change is kept
_LOSS = -0.01  # of it, below which workers that were taken come back
_SPARE = 1.1  # workers beside those that the rate asks for
_MOST = 2.0  # times the rate that one change is for, at most
_LEAST = 1.06
_TIMES = 2  # the workers of a stage, and one, at most after one change
_LONGEST = 32  # intervals until something is tried again
_PATIENCE = 4  # intervals in which a change is judged
_CLEAR = 1.5  # standard errors that make an effect clear
_WINDOW = 8  # intervals whose mean counts
_SURPRISE = 4.0  # standard deviations, from which a pipeline is not what it was
_RATE, _SERVICE = 0.1, 0.2  # logs of ratios that surprise at least


class _Means:
    """Over the last intervals with the same workers."""

    def __init__(self) -> None:
        self.count = 0
        self.rate = self.starved = 0.0
        self.services: list[float] = []

    def add(self, view: View) -> None:
        self.count = min(self.count + 1, _WINDOW)
        self.rate += (view.rate - self.rate) / self.count
        self.starved += (view.starved - self.starved) / self.count
        new = [stage.service for stage in view.stages]
        self.services = [
            old + (its - old) / self.count if old else its for old, its in zip(self.services or new, new, strict=True)
        ]


class _Noise:
    """How much a figure differs between intervals with the same workers."""

    def __init__(self) -> None:
        self._deviations: deque[float] = deque(maxlen=4 * _WINDOW)

    def add(self, value: float, mean: float, count: int, least: float) -> bool:
        """Whether another value is too far from the mean of so many to be one of them."""
        if value <= 0 or mean <= 0:
            return False
        error = math.sqrt(1 + 1 / count)
        distance = abs(math.log(value / mean))
        is_far = distance > max(least, _SURPRISE * error * self.deviation)
        self._deviations.append(distance / error)
        return is_far

    @property
    def deviation(self) -> float:
        """Standard deviation of its logarithm, from the median: a few intervals that are far off change little."""
        return 1.48 * statistics.median(self._deviations) if self._deviations else 0.0


class _Pause:
    """Intervals in which something is not tried again, twice as many each time."""

    def __init__(self) -> None:
        self.left = 0
        self._next = 1

    def pass_one(self) -> None:
        self.left = max(0, self.left - 1)

    def begin(self) -> None:
        self.left, self._next = self._next, min(_LONGEST, 2 * self._next)


@dataclass(frozen=True)
class _Trial:
    """A change whose effect is not known yet."""

    before: tuple[int, ...]
    means: _Means
    is_more: bool


class Rule:
    """Decides the number of workers of each stage, interval by interval."""

    def __init__(self) -> None:
        self._workers: tuple[int, ...] = ()
        self._limit = 0
        self._means = _Means()
        self._rates, self._services = _Noise(), _Noise()
        self._trial: _Trial | None = None
        self._begin()

    def _begin(self) -> None:
        """Nothing is known of what helps."""
        self._step = _MOST  # times the rate that the next change is for
        self._rest, self._wait = _Pause(), _Pause()  # of taking workers, and of adding them
        self._waits = False  # between steps, too: all were tried
        self._least: list[float] = []  # service of each stage when its workers took least from each other

    def decide(self, view: View) -> tuple[int, ...]:
        """The workers of each stage from now on."""
        workers = tuple(stage.workers for stage in view.stages)
        if view.memory > view.limit:
            self._trial = None
            return self._go_on(workers, shed(view))
        self._notice(view, workers)
        trial = self._trial
        if trial is not None:
            is_good = self._judge(trial)
            if is_good is None:
                return workers
            self._trial = None
            self._learn(is_good, trial.is_more)
            if not is_good and _fits(view, workers, trial.before):
                self._means = trial.means
                self._workers = trial.before
                return trial.before
        return self._go_on(workers, self._next(view, workers))

    def _go_on(self, workers: tuple[int, ...], changed: tuple[int, ...]) -> tuple[int, ...]:
        if changed != workers:
            self._means = _Means()
        self._workers = changed
        return changed

    def _notice(self, view: View, workers: tuple[int, ...]) -> None:
        """Counts an interval, and begins anew if it is one of another pipeline."""
        if workers != self._workers:  # something else has changed them
            self._trial, self._means = None, _Means()
        if view.limit != self._limit or (self._trial is None and self._means.count and self._surprises(view)):
            self._means = _Means() if self._trial is None else self._means
            self._begin()
        self._limit = view.limit
        self._means.add(view)
        if self._means.count > 1 or not self._least:
            now = self._means.services
            self._least = [min(old, new) if old else new for old, new in zip(self._least or now, now, strict=True)]

    def _surprises(self, view: View) -> bool:
        means = self._means
        far = [self._rates.add(view.rate, means.rate, means.count, _RATE)]
        for stage, mean in zip(view.stages, means.services, strict=True):
            far.append(self._services.add(stage.service, mean, means.count, _SERVICE))
        return any(far)

    def _judge(self, trial: _Trial) -> bool | None:
        """None if it is not clear yet."""
        before, now = trial.means, self._means
        if not now.rate or not before.rate:
            return not before.rate
        error = self._rates.deviation * math.sqrt(1 / now.count + 1 / before.count)
        gain = math.log(now.rate / before.rate) - (_GAIN if trial.is_more else _LOSS)
        if abs(gain) < _CLEAR * error and now.count < _PATIENCE:
            return None
        # In doubt there are fewer: kept by chance, workers would become ever more where they gain nothing.
        return gain >= (error if trial.is_more else -error)

    def _next(self, view: View, workers: tuple[int, ...]) -> tuple[int, ...]:
        self._rest.pass_one()
        self._wait.pass_one()
        if self._means.starved > STARVED and not self._wait.left:
            changed = _raised(view, workers, self._means, self._step)
            if changed == workers:
                self._learn(False, is_more=True)
        elif not self._rest.left:
            changed = _lowered(workers, self._means.rate, self._least, _SPARE + self._rates.deviation)
        else:
            return workers
        if changed != workers:
            self._trial = _Trial(workers, self._means, is_more=sum(changed) > sum(workers))
        return changed

    def _learn(self, good: bool, is_more: bool) -> None:
        if is_more and good:
            self._step, self._wait, self._waits = min(_MOST, 1 + 2 * (self._step - 1)), _Pause(), False
        elif is_more:
            self._step = 1 + (self._step - 1) / 2
            if self._step < max(_LEAST, 1 + 2 * self._rates.deviation):
                self._step, self._waits = _MOST, True
            if self._waits:
                self._wait.begin()
        elif good:
            self._rest = _Pause()
        else:
            self._rest.begin()


def _fits(view: View, workers: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether there is memory for what other workers are expected to take."""
    more = sum(max(0, b - a) * stage.worker_bytes for stage, a, b in zip(view.stages, workers, wanted, strict=True))
    return view.memory + more <= view.limit


def _raised(view: View, workers: tuple[int, ...], means: _Means, step: float) -> tuple[int, ...]:
    """Workers for so many times the rate, as far as memory reaches: first where the least would be done."""
    left, room = list(workers), view.limit - view.memory
    goal = means.rate * step
    while True:
        short = [
            i
            for i, service in enumerate(means.services)
            if service and left[i] < min(goal * service, _TIMES * workers[i] + 1)
        ]
        if not short:
            return tuple(left)
        lowest = min(short, key=lambda i: left[i] / means.services[i])
        room -= view.stages[lowest].worker_bytes
        if room < 0:
            return tuple(left)
        left[lowest] += 1


def _lowered(workers: tuple[int, ...], rate: float, services: Sequence[float], spare: float) -> tuple[int, ...]:
    """Without the workers that are not needed for the rate."""
    return tuple(
        min(count, max(1, _ceil(rate * service * spare))) if service else count
        for count, service in zip(workers, services, strict=True)
    )


def shed(view: View) -> tuple[int, ...]:
    """Takes workers away until what is left fits the limit, where one has most memory first. One of each stays."""
    left, memory = [stage.workers for stage in view.stages], view.memory
    while memory > view.limit:
        able = [index for index, count in enumerate(left) if count > 1 and view.stages[index].worker_bytes]
        if not able:
            break
        index = max(able, key=lambda index: view.stages[index].worker_bytes)
        left[index] -= 1
        memory -= view.stages[index].worker_bytes
    return tuple(left)


def _ceil(value: float) -> int:
    return int(min(value, 1e6)) + (value % 1 > 0 if value < 1e6 else 0)
