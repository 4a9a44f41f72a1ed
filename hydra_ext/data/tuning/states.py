"""What the agent knows of a pipeline, in numbers that do not depend on its size, and what it can do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hydra_ext.data.tuning.views import StageView, View

ACTIONS = (0.5, 0.875, 1.0, 1.125, 2.0)  # times the workers of a stage, at least one more or less
NOTHING = ACTIONS.index(1.0)
FEATURES = 15
_FAR = 3.0  # of a logarithm: what is farther is as far
_FORGETS = 0.95  # of the highest rate and of the least service times, an interval


@dataclass(frozen=True)
class State:
    """One interval.

    Attributes:
        features: FEATURES numbers of each stage.
        allowed: Of each stage and action: whether the stage can take it alone, within the limit.
    """

    features: Sequence[Sequence[float]]
    allowed: Sequence[Sequence[bool]]


class Memory:
    """What is kept of earlier intervals of one pipeline."""

    def __init__(self) -> None:
        self._workers: tuple[int, ...] = ()
        self._rate = 0.0
        self._highest = 0.0
        self._least: list[float] = []
        self._unchanged = 0

    def state(self, view: View) -> State:
        """Of a view, and of those that came before."""
        workers = tuple(stage.workers for stage in view.stages)
        before = self._workers or workers
        self._unchanged = self._unchanged + 1 if workers == before else 0
        self._highest = max(view.rate, _FORGETS * self._highest)
        self._least = [
            min(stage.service, least / _FORGETS) if least and stage.service else stage.service or least
            for stage, least in zip(view.stages, self._least or [0.0] * len(workers), strict=True)
        ]
        shared = [
            view.starved,
            _log(1 - view.starved, 1.0),
            view.memory / view.limit,
            _log(view.rate, self._rate),
            _log(view.rate, self._highest),
            math.log1p(self._unchanged) / 2,
            sum(map(_log, workers, before)) / len(workers),
        ]
        slowest = min((_capacity(stage) for stage in view.stages), default=0.0)
        features = [
            _of_stage(view, stage, slowest, least, count) + shared
            for stage, least, count in zip(view.stages, self._least, before, strict=True)
        ]
        self._workers, self._rate = workers, view.rate
        room = view.limit - view.memory
        allowed = [
            [_after(stage.workers, each) >= 1 and _cost(stage, each) <= max(0, room) for each in range(len(ACTIONS))]
            for stage in view.stages
        ]
        return State(features, allowed)


def taken(view: View, wishes: Sequence[int], gains: Sequence[float]) -> tuple[list[int], tuple[int, ...]]:
    """The actions that are taken of those that stages wish for, and the workers then.

    Those that free memory all are; those that need some one by one, while what they need together fits: first what
    gains most. What is freed in the same interval may not be free in time, and does not count.
    """
    actions = [min(wish, NOTHING) for wish in wishes]
    room = view.limit - view.memory
    for index in sorted(range(len(wishes)), key=lambda index: -gains[index]):
        cost = _cost(view.stages[index], wishes[index])
        if wishes[index] > NOTHING and cost <= room:
            actions[index] = wishes[index]
            room -= cost
    return actions, tuple(_after(stage.workers, each) for stage, each in zip(view.stages, actions, strict=True))


def _of_stage(view: View, stage: StageView, slowest: float, least: float, before: int) -> list[float]:
    free = max(0, view.limit - view.memory) / max(1, stage.worker_bytes)
    return [
        math.log2(stage.workers) / 4,
        _log(view.rate * stage.service, stage.workers),
        _log(view.rate * stage.service, stage.workers - 1) if stage.workers > 1 else _FAR,
        _log(_capacity(stage), slowest) / 2,
        min(3.0, math.log2(1 + free) / 4),
        stage.worker_bytes * stage.workers / view.limit,
        _log(stage.service, least),
        _log(stage.workers, before),
    ]


def _capacity(stage: StageView) -> float:
    return stage.workers / stage.service if stage.service else 0.0


def _log(value: float, reference: float) -> float:
    """Of their ratio, 0 if one is not known."""
    return max(-_FAR, min(_FAR, math.log(value / reference))) if value > 0 and reference > 0 else 0.0


def _after(workers: int, action: int) -> int:
    times = ACTIONS[action]
    if times > 1:
        return max(workers + 1, int(workers * times))
    return min(workers - 1, math.ceil(workers * times)) if times < 1 else workers


def _cost(stage: StageView, action: int) -> int:
    return (_after(stage.workers, action) - stage.workers) * stage.worker_bytes
