"""Plans that forecasts cannot tell apart are timed, and the fastest one stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hydra_ext.runtime.step_planner import PlannedStep

_TURNS = 2  # of each plan, before they are compared
_TIMED = 2  # steps of a turn that count


@dataclass(frozen=True)
class StepSeconds:
    """What a step took, or a moment by the same clocks.

    Attributes:
        seconds: In all.
        computed: Of the thread that computes, without waits; None on a GPU, where no thread does.
    """

    seconds: float
    computed: float | None = None

    def since(self, begin: StepSeconds) -> StepSeconds:
        computed = None if self.computed is None or begin.computed is None else self.computed - begin.computed
        return StepSeconds(self.seconds - begin.seconds, computed)

    def or_less(self, other: StepSeconds) -> StepSeconds:
        """The less of each."""
        computed = None if self.computed is None or other.computed is None else min(self.computed, other.computed)
        return StepSeconds(min(self.seconds, other.seconds), computed)


class PlanTrials:
    """The plans for steps of one kind, and their times.

    Plans take turns, since a machine is faster at some times than at others. Of a turn's steps the first is slower than
    those that follow and not counted. The shortest of the others is the plan's time: what else the machine does makes a
    step longer and never shorter.

    Attributes:
        planned: The step as it runs now.
        seconds: Of the shortest step by each plan so far; of its compute likewise.
        replans: Number of times that a forecast was far off.
    """

    def __init__(self, plans: list[PlannedStep]) -> None:
        self.seconds: dict[PlannedStep, StepSeconds] = {}
        self.replans = 0
        self._turns = plans * _TURNS if len(plans) > 1 else [*plans]  # to come
        self.planned = self._turns.pop(0)
        self._is_cold = True
        self._left = _TIMED  # steps of this turn

    def note(self, took: StepSeconds) -> bool:
        """Notes a step's time. Returns whether all plans have been timed now: the fastest is taken."""
        if self._is_cold:
            self._is_cold = False
            return False
        self.seconds[self.planned] = took.or_less(self.seconds.get(self.planned, took))
        if self._left == 0:
            return False
        self._left -= 1
        if self._left > 0:
            return False
        if self._turns:
            self._begin_turn()
            return False
        self._take(min(self.seconds, key=lambda plan: self.seconds[plan].seconds))
        return True

    def try_also(self, plans: list[PlannedStep]) -> None:
        """Has those timed that were not, beside the fastest. Equal ones are replaced: their forecasts are newer."""
        for plan in plans:
            if plan in self.seconds:
                self.seconds[plan] = self.seconds.pop(plan)
            if plan == self.planned:
                self.planned = plan
        new = [plan for plan in plans if plan not in self.seconds]
        if new:
            self._turns = [*new, self.planned] * _TURNS
            self._begin_turn()

    def _begin_turn(self) -> None:
        self._take(self._turns.pop(0))
        self._left = _TIMED

    def _take(self, planned: PlannedStep) -> None:
        self._is_cold = planned is not self.planned
        self.planned = planned
