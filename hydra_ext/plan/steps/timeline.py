"""What compute and each direction of the link do when in a planned step, and the memory beside it.

The simulation is the one whose seconds the planner compares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hydra_ext import _C
from hydra_ext.plan.segments import Segment
from hydra_ext.plan.steps.memory import MemoryPoint, memory_of
from hydra_ext.plan.steps.problem import Homes, StepProblem, StepSetting

_LANES = {  # of each kind of work, and its name there
    _C.StepWorkKind.FORWARD: ("compute", "forward"),
    _C.StepWorkKind.RECOMPUTE: ("compute", "recompute"),
    _C.StepWorkKind.BACKWARD: ("compute", "backward"),
    _C.StepWorkKind.BRING_WEIGHTS: ("to device", "weights"),
    _C.StepWorkKind.BRING_STASH: ("to device", "stash"),
    _C.StepWorkKind.SEND_STASH: ("to host", "stash"),
    _C.StepWorkKind.SEND_GRADIENTS: ("to host", "gradients"),
    _C.StepWorkKind.UPDATE: ("optimizer", "update"),
}


@dataclass(frozen=True, kw_only=True)
class LaneInterval:
    """A time in which one lane is busy.

    Attributes:
        lane: ``compute``, ``to device``, ``to host`` or ``optimizer``.
        kind: ``forward``, ``recompute`` or ``backward``, of one microbatch; ``weights`` or ``gradients``; ``stash``,
            for saved tensors of one microbatch; ``update``, as far as the next step's forward does not hide it.
        segment: Its name, as in ``Plan.segments``; empty for an update.
        begin: Seconds since the step began.
        end: Likewise.
        nbytes: Of what moves.
    """

    lane: str
    kind: str
    segment: str
    begin: float
    end: float
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """A planned step over time.

    Attributes:
        intervals: Those of each lane are in the order of time, and do not overlap.
        memory: Moments in seconds, and the device bytes from each one to the next, or to the step's end. A last round
            of fewer microbatches counts as a full one.
    """

    intervals: tuple[LaneInterval, ...]
    memory: tuple[tuple[float, MemoryPoint], ...]


@dataclass(frozen=True, kw_only=True)
class TreatedStep:
    """A step and how it runs: all that its simulation needs. Plain values.

    Attributes:
        segments: Of the cut that the planner chose.
        setting: As the planner had it.
        homes: Likewise.
        budget: Device bytes, with buffers.
        options: One for each segment.
        round_size: Microbatches that run together.
        stash_bytes: Room for activations on their way.
        heads_in_rows: Names of heads that run in rows.
    """

    segments: tuple[Segment, ...]
    setting: StepSetting
    homes: Homes
    budget: int
    options: tuple[_C.ActivationOption, ...]
    round_size: int
    stash_bytes: int
    heads_in_rows: tuple[str, ...]

    @classmethod
    def of(
        cls, problem: StepProblem, budget: int, found: _C.ActivationPlan, *, heads_in_rows: Sequence[str]
    ) -> TreatedStep:
        return cls(
            segments=tuple(problem.segments[found.cut]),
            setting=problem.setting,
            homes=problem.homes,
            budget=budget,
            options=tuple(found.options),
            round_size=found.round_size,
            stash_bytes=found.stash_bytes,
            heads_in_rows=tuple(heads_in_rows),
        )

    def memory(self) -> tuple[MemoryPoint, ...]:
        """Device bytes over a round: forward, then backward."""
        return memory_of(self.segments, self, self.setting.buffer_bytes)

    def held_bytes(self) -> int:
        """The most device bytes in use, with all that stays because there is room."""
        beside = max(each.total - each.weights for each in self.memory())
        needed = max(each.total - each.weights - each.gradients for each in self.memory())
        weights = sum(segment.weight_bytes for segment in self.segments)
        room = self.budget - needed - weights - self.homes.left_free
        at_home = needed + weights + min(self.homes.on_device, max(0, room))
        return min(self.budget, max(beside + weights, at_home))

    def timeline(self) -> StepTimeline:
        setting = self.setting
        record = _C.record_step(
            [segment.core() for segment in self.segments],
            options=self.options,
            round_size=self.round_size,
            stash_bytes=self.stash_bytes,
            microbatches=setting.microbatches,
            budget=self.budget - setting.buffer_bytes,
            to_device=setting.to_device,
            to_host=setting.to_host,
            update_seconds=setting.update_seconds,
            host_bytes=self.homes.room,
            disk=self.homes.disk or math.inf,  # of unknown speed: planned as if it took no time
        )
        points = self.memory()
        return StepTimeline(
            intervals=tuple(self._interval(work) for work in record.work),
            memory=tuple((begin, points[number % len(points)]) for number, begin in enumerate(record.stays)),
        )

    def _interval(self, work: _C.StepWork) -> LaneInterval:
        lane, kind = _LANES[work.kind]
        name = "" if work.segment is None else self.segments[work.segment].name or "(the model)"
        return LaneInterval(lane=lane, kind=kind, segment=name, begin=work.begin, end=work.end, nbytes=work.bytes)
