"""The rule: more workers where items queue up in front and run out behind, kept if the consumer goes faster.

Occupancy says which stage to change, and hill climbing on the consumer's rate says whether the change was good. So what
workers take from the training itself counts, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydra_ext.data.tuning.views import STARVED, View

_GAIN = 1.01  # of the rate, for which a change is kept
_LOSS = 0.99  # of the rate, for which workers that were taken come back
_SPARE = 1.1  # workers beside those that the rate asks for
_MOST = 2.0  # times the rate that one change is for, at most
_LEAST = 1.06


@dataclass(frozen=True)
class _Trial:
    """A change whose effect is not known yet."""

    before: tuple[int, ...]
    rate: float
    is_more: bool


class Rule:
    """Decides the number of workers of each stage, interval by interval."""

    def __init__(self) -> None:
        self._trial: _Trial | None = None
        self._step = _MOST  # times the rate that the next change is for
        self._rest = 0  # intervals in which no worker is taken
        self._next_rest = 1
        self._wait = 0  # intervals in which none is added
        self._next_wait = 1

    def decide(self, view: View) -> tuple[int, ...]:
        """The workers of each stage from now on."""
        workers = tuple(stage.workers for stage in view.stages)
        trial, self._trial = self._trial, None
        if view.memory > view.limit:
            return shed(view)
        if trial is not None:
            good = view.rate >= trial.rate * (_GAIN if trial.is_more else _LOSS)
            self._learn(good, trial.is_more)
            if not good and _fits(view, workers, trial.before):
                return trial.before
        self._rest, self._wait = max(0, self._rest - 1), max(0, self._wait - 1)
        if view.starved > STARVED and not self._wait:
            changed = _raised(view, workers, self._step)
            if changed == workers:
                self._learn(False, is_more=True)
        elif not self._rest:
            changed = _lowered(view, workers)
        else:
            return workers
        if changed != workers:
            self._trial = _Trial(workers, view.rate, is_more=sum(changed) > sum(workers))
        return changed

    def _learn(self, good: bool, is_more: bool) -> None:
        if is_more and good:
            self._step, self._wait, self._next_wait = min(_MOST, 1 + 2 * (self._step - 1)), 0, 1
        elif is_more:
            self._step = 1 + (self._step - 1) / 2
            if self._step < _LEAST:
                self._step, self._wait, self._next_wait = _MOST, self._next_wait, min(32, 2 * self._next_wait)
        elif good:
            self._rest, self._next_rest = 0, 1
        else:
            self._rest, self._next_rest = self._next_rest, min(32, 2 * self._next_rest)


def _fits(view: View, workers: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether there is memory for what other workers are expected to take."""
    more = sum(max(0, b - a) * stage.worker_bytes for stage, a, b in zip(view.stages, workers, wanted, strict=True))
    return view.memory + more <= view.limit


def _raised(view: View, workers: tuple[int, ...], step: float) -> tuple[int, ...]:
    """Workers for so many times the rate, as far as memory reaches: first where the least would be done."""
    left, room = list(workers), view.limit - view.memory
    goal = view.rate * step
    while True:
        short = [i for i, stage in enumerate(view.stages) if stage.service and left[i] < goal * stage.service]
        if not short:
            return tuple(left)
        lowest = min(short, key=lambda i: left[i] / view.stages[i].service)
        room -= view.stages[lowest].worker_bytes
        if room < 0:
            return tuple(left)
        left[lowest] += 1


def _lowered(view: View, workers: tuple[int, ...]) -> tuple[int, ...]:
    """Without the workers that are not needed for the rate."""
    return tuple(
        min(count, max(1, _ceil(view.rate * stage.service * _SPARE))) if stage.service else count
        for stage, count in zip(view.stages, workers, strict=True)
    )


def shed(view: View) -> tuple[int, ...]:
    """Takes workers away until what is left fits the limit, where one has most memory first. One of each stays."""
    left, memory = [stage.workers for stage in view.stages], view.memory
    while memory > view.limit:
        able = [index for index, count in enumerate(left) if count > 1]
        if not able:
            break
        index = max(able, key=lambda index: view.stages[index].worker_bytes)
        left[index] -= 1
        memory -= max(1, view.stages[index].worker_bytes)
    return tuple(left)


def _ceil(value: float) -> int:
    return int(min(value, 1e6)) + (value % 1 > 0 if value < 1e6 else 0)
