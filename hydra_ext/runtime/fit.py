"""Fits a run's activations into its budget: measures one microbatch, plans the step, and falls back if it fails.

The first microbatch runs under a stash that keeps nothing on the device, the *frugal* way, and is measured. The planner
(:mod:`hydra_ext.plan`) then chooses the size of rounds, the modules that are recomputed, and the stash's room: how many
bytes of saved tensors may stay. What stays can still leave if an allocation needs its memory, so a wrong forecast costs
time and rarely a retry. Where memory does run out, the microbatch is measured anew and planned with less memory; the
next failure in the same step falls back to the frugal way.

Source: the options are those of Rotor (Beaumont et al., NeurIPS 2021) and of vDNN (Rhu et al., MICRO 2016).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch
from torch import nn

from hydra_ext import _C
from hydra_ext.activations.profiler import Profiler
from hydra_ext.activations.saving import Saving
from hydra_ext.blocks import Layout
from hydra_ext.errors import PlanError
from hydra_ext.plan.steps.answer import answer
from hydra_ext.plan.steps.forecast import Plan
from hydra_ext.plan.steps.problem import StepProblem, StepSetting
from hydra_ext.profile import ModuleFigures, Profile
from hydra_ext.runtime.placement.residents import buffer_bytes
from hydra_ext.runtime.rounds.choice import Decision

logger = logging.getLogger(__name__)

_STRICT = 1  # byte of room: saved tensors leave at once, and come when they are read
_SHARE = 0.97  # of the budget that a plan may take
_LOOP_SHARE = 0.85  # of that, in a loop of the user with modules that are recomputed
_CUDA_SHARE = 0.9  # there: memory that the allocator cannot use, since it is in pieces
_TIGHTER = 0.94  # of that share, after a failure that no change of shapes explains
_MOST_FAILURES = 3  # in one step, before the frugal way
_OFF = 0.3  # a step that differs by more from its forecast is planned again; a plan that is slower is not timed
_REPLANS = 3  # for this reason, without new measurements
_LOOK_AGAIN = 20  # frugal steps after which a microbatch is measured anew: others may have come
_LEAST_SAMPLE = 2**16  # bytes from which a lane's speed is measured
_NOTHING = Profile(modules={"": ModuleFigures(name="")})  # of a model whose forward was not seen


class Rung(Enum):
    """How the next microbatches run."""

    GIVEN = "as the user says; else one is measured"
    MEASURED = "one, to be measured, the frugal way"
    PLANNED = "as planned"
    FRUGAL = "one at a time, with nothing on the device that could leave"


class FitOwner(Protocol):
    """The run whose activations are fitted."""

    model: nn.Module
    layout: Layout
    core: _C.PagedModel
    device: torch.device

    def activation_bytes(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """What the planner has chosen for a step.

    Attributes:
        names: The segments.
        options: What becomes of what each segment saves.
        round_size: Microbatches that run together; 1 for one after the other.
        room: Device bytes of saved tensors that may stay: those that the plan keeps, and those on their way. The stash
            keeps the newest ones, whatever the plan has kept: they are read first.
        seconds: Of a step, as foreseen.
        compute_seconds: Of these, those in which the device computes.
        peak_bytes: Of the device, as foreseen.
        problem: What the planner was asked.
        found: Its answer.
    """

    names: tuple[str, ...]
    options: tuple[_C.ActivationOption, ...]
    round_size: int
    room: int
    seconds: float
    compute_seconds: float
    peak_bytes: int
    problem: StepProblem = field(compare=False, repr=False)
    found: _C.ActivationPlan = field(compare=False, repr=False)

    @property
    def keeps_all(self) -> bool:
        return all(option == _C.ActivationOption.KEEP for option in self.options)

    @property
    def recomputed(self) -> list[str]:
        again = (_C.ActivationOption.RECOMPUTE, _C.ActivationOption.RECOMPUTE_OFFLOADED)
        return [name for name, option in zip(self.names, self.options, strict=True) if option in again]


@dataclass(frozen=True)
class _Asked:
    """What a plan depends on, beside what was measured."""

    microbatches: int
    size: int | None
    recompute: bool


_LOOP = _Asked(1, 1, recompute=True)  # a loop of the user


@dataclass
class _Trials:
    """The plans for steps of one kind, and their times.

    Attributes:
        planned: The step as it runs now.
        candidates: Other plans, to be timed.
        seconds: Of a step as planned.
        warm: The plan by which the last step ran: the first step by a plan is slower than those that follow.
        replans: Number of times that a forecast was far off.
    """

    planned: PlannedStep
    candidates: list[PlannedStep]
    seconds: dict[PlannedStep, float] = field(default_factory=dict)
    warm: PlannedStep | None = None
    replans: int = 0

    def note(self, seconds: float) -> bool:
        """Notes a step's time, and goes on to the next candidate, or to the fastest plan. Returns whether it is new."""
        if self.planned is not self.warm:
            self.warm = self.planned
            return False
        known = self.seconds.get(self.planned)
        self.seconds[self.planned] = seconds if known is None else min(known, seconds)
        if self.candidates:
            self.planned = self.candidates.pop(0)
        elif known is None:
            self.planned = min(self.seconds, key=self.seconds.__getitem__)
        return known is None


class Fit:
    """The activations of one run. Its methods are called by the thread that makes the steps.

    Args:
        owner: The run.
        saving: Its stash.
        budget: Device bytes.

    Attributes:
        profile: What one microbatch cost; None before it was measured.
        plans: Number of plans that were made.
    """

    def __init__(self, owner: FitOwner, saving: Saving, budget: int) -> None:
        self._owner = owner
        self._saving = saving
        self._budget = budget
        # On a GPU an allocation cannot wait until something has left, so rounds are planned there in any case.
        on_gpu = owner.device.type == "cuda"
        self._rung = Rung.MEASURED if on_gpu else Rung.GIVEN
        self._share = _CUDA_SHARE if on_gpu else _SHARE
        self._slowness = 1.0  # measured seconds of compute over those of the measured microbatch
        self._failures = 0  # in this step
        self._plan_failed = False
        self._frugal_steps = 0  # since a microbatch was measured
        self._asked = _LOOP
        self._trials: dict[_Asked, _Trials] = {}
        self._applied: PlannedStep | None = None
        self._profiler: Profiler | None = None
        self._began: float | None = None
        self._lanes: tuple[_LaneSpeed, _LaneSpeed] = (_LaneSpeed(), _LaneSpeed())
        self.profile: Profile | None = None
        self.plans = 0

    @property
    def planned(self) -> PlannedStep | None:
        """The step as it runs now; None before a plan, or if none fits."""
        return self._applied

    def answer(self) -> Plan | None:
        """Describes the step as it runs now, foreseen beside measured; None before a plan, or if none fits."""
        planned = self._applied
        if planned is None:
            return None
        times = [trials.seconds[planned] for trials in self._trials.values() if planned in trials.seconds]
        peak = self._owner.core.memory.ledger.peak
        seconds = min(times, default=None)
        return answer(planned.problem, self._budget, planned.found, measured_seconds=seconds, measured_peak_bytes=peak)

    # ---- run.step ---------------------------------------------------------------------------------------------------

    def step_begins(self, count: int, *, size: int | None, recompute: bool | None) -> None:
        """A step of ``count`` microbatches begins; ``size`` and ``recompute`` are the user's arguments."""
        self._asked = _Asked(count, size, recompute is not False)
        if self._rung is Rung.FRUGAL:
            self._frugal_steps += 1
            if self._failures or self._frugal_steps >= _LOOK_AGAIN:
                self._rung = Rung.MEASURED
        self._failures = 0
        self._began = time.perf_counter() if self._rung is Rung.PLANNED else None

    def next(self, left: int, *, size: int | None, recompute: bool | None) -> Decision:
        """The round to run when ``left`` microbatches remain."""
        wanted = min(size or left, left)
        if self._rung is Rung.GIVEN and (size is not None or recompute):
            self._saving.set_room(self._budget)
            return Decision(wanted, recompute=recompute is True)
        if self._rung is Rung.PLANNED:
            trials = self._trials_now()
            if trials is not None:
                planned = trials.planned
                self._apply(planned, keeps_all=planned.keeps_all)
                together = min(size or planned.round_size, left)
                return Decision(together, recompute=recompute is True, alone=planned.round_size == 1 and not recompute)
            self._rung = Rung.FRUGAL
        self._go_frugal()
        if self._rung is not Rung.FRUGAL:
            self._measure()
            return Decision(1, recompute=False, alone=True)
        return Decision(wanted, recompute=False, alone=size is None or size == 1)

    def learn(self, _decision: Decision, *, held: int, peak: int) -> None:
        """A round has ended."""
        self._settle()

    def fail(self, _decision: Decision, *, size: int | None, recompute: bool | None, looped: bool) -> str:
        """Notes that a round has run out of memory. Returns what was tried if nothing is left to try."""
        self._profiler = None
        self._saving.measure(None)
        self._failures += 1
        self._began = None
        failed, self._rung = self._rung, Rung.FRUGAL
        if failed in (Rung.GIVEN, Rung.PLANNED):
            self._plan_failed = failed is Rung.PLANNED
            if self._failures < _MOST_FAILURES:
                self._rung = Rung.MEASURED
            return ""
        together = "one at a time" if size is None or size == 1 else f"in rounds of {size}"
        return f"run.step ran the microbatches {together}, with nothing on the device that could leave it."

    def step_ended(self) -> None:
        """A step has ended well. Plans that forecasts cannot tell apart are timed, and the fastest one stays."""
        trials = self._trials.get(self._asked)
        if self._began is None or trials is None:
            return
        planned, seconds = trials.planned, time.perf_counter() - self._began
        if trials.note(seconds) and not trials.candidates and trials.replans < _REPLANS:
            slowness = _slowness(planned, seconds)
            if slowness is not None:
                trials.replans += 1
                self._slowness *= slowness
                trials.candidates = [plan for plan in self._plans() if plan not in trials.seconds]

    # ---- a loop of the user -----------------------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """A forward outside ``run.step`` begins, whose backward may follow."""
        self._asked = _LOOP
        profiler = self._profiler
        if self._rung in (Rung.GIVEN, Rung.MEASURED) and (profiler is None or profiler.failed):
            self._go_frugal()
            self._measure()
        elif self._rung is Rung.PLANNED:
            trials = self._trials_now()
            if trials is None:
                self._rung = Rung.FRUGAL
                self._go_frugal()
            else:  # nothing can be undone, so even if all is kept it can still leave
                self._apply(trials.planned, keeps_all=False)

    def backward_ended(self) -> None:
        """A backward outside ``run.step`` has ended, perhaps one that a forward has made."""
        if self._profiler is not None and self._profiler.has_run and not self._profiler.runs:
            self._settle()

    # ---- measuring --------------------------------------------------------------------------------------------------

    def _go_frugal(self) -> None:
        self._applied = None
        self._saving.leaves_all_on_device = False
        self._saving.recompute((), self._owner.device)
        self._saving.set_room(_STRICT)

    def _measure(self) -> None:
        owner = self._owner
        self._rung = Rung.MEASURED
        self._frugal_steps = 0
        self._profiler = Profiler(owner.model, owner.layout, owner.core, owner.activation_bytes, owner.device)
        self._saving.measure(self._profiler)
        backend = owner.core.memory.backend
        self._lanes = (
            _LaneSpeed(lambda: backend.to_device_statistics),
            _LaneSpeed(lambda: backend.to_host_statistics),
        )

    def _settle(self) -> None:
        """Takes what was measured: nothing if no forward was seen, or hooks of others were there."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        self._saving.measure(None)
        known, self.profile = self.profile, profiler.profile() if profiler.has_run else _NOTHING
        is_alike = known is not None and known.modules[""].saved == self.profile.modules[""].saved
        self._share *= _TIGHTER if self._plan_failed and is_alike else 1.0
        self._plan_failed = False
        self._rung = Rung.PLANNED
        self._trials.clear()

    # ---- planning ---------------------------------------------------------------------------------------------------

    def _trials_now(self) -> _Trials | None:
        """The plans for the present kind of step; None if none fits."""
        if self._asked not in self._trials:
            plans = self._plans()
            if plans:
                self._trials[self._asked] = _Trials(plans[0], plans[1:])
        return self._trials.get(self._asked)

    def _plans(self) -> list[PlannedStep]:
        """The best plan, and the best one with the other kind of rounds if it is hardly slower. Empty if none fits."""
        asked, count = self._asked, self._asked.microbatches
        if asked is _LOOP:
            # What a second forward saves cannot leave, and a failure cannot be undone.
            plans = [self._plan([1], recompute=True, share=_LOOP_SHARE), self._plan([1], recompute=False)]
            return sorted(filter(None, plans), key=lambda plan: plan.seconds)[:1]
        best = self._plan([] if asked.size is None else [min(asked.size, count)], recompute=asked.recompute)
        if best is None or asked.size is not None or count == 1:
            return [] if best is None else [best]
        other = self._plan([1] if best.round_size > 1 else list(range(2, count + 1)), recompute=asked.recompute)
        is_near = other is not None and other.seconds <= (1 + _OFF) * best.seconds
        return [best, other] if is_near and other is not None else [best]

    def _plan(self, round_sizes: list[int], *, recompute: bool, share: float = 1.0) -> PlannedStep | None:
        if self.profile is None:
            return None
        to_device, to_host = (lane.bytes_per_second() for lane in self._lanes)
        setting = StepSetting(
            microbatches=self._asked.microbatches,
            to_device=to_device,
            to_host=to_host,
            buffer_bytes=buffer_bytes(self._owner.model),
            round_sizes=tuple(round_sizes),
            recompute=recompute,
            slowness=self._slowness,
        )
        problem = StepProblem(self.profile, setting)
        try:
            found = problem.solve(int(self._budget * self._share * share))
        except PlanError as error:
            logger.info("no plan for the step's activations: %s", error)
            return None
        self.plans += 1
        keeps_all = all(option == _C.ActivationOption.KEEP for option in found.options)
        room = found.stash_bytes + found.round_size * problem.kept_bytes(found)
        planned = PlannedStep(
            names=problem.names[found.cut],
            options=tuple(found.options),
            round_size=found.round_size,
            room=self._budget if keeps_all else max(_STRICT, room),
            seconds=found.seconds,
            compute_seconds=found.compute_seconds,
            peak_bytes=found.peak_bytes + setting.buffer_bytes,
            problem=problem,
            found=found,
        )
        logger.info("activations: %s", planned)
        return planned

    def _apply(self, planned: PlannedStep, *, keeps_all: bool) -> None:
        self._saving.leaves_all_on_device = keeps_all
        if planned is self._applied:
            return
        modules = dict(self._owner.model.named_modules())
        self._saving.recompute([modules[name] for name in planned.recomputed], self._owner.device)
        self._saving.set_room(planned.room)
        self._applied = planned


def _slowness(planned: PlannedStep, seconds: float) -> float | None:
    """Measured seconds of compute over those foreseen, if the forecast was far off; None if it was not."""
    ratio = seconds / planned.seconds if planned.seconds > 0 else 1.0
    if abs(math.log(ratio)) <= math.log(1 + _OFF):
        return None
    rest = planned.seconds - planned.compute_seconds
    return min(max((seconds - rest) / max(planned.compute_seconds, 1e-9), 0.5), 2.0)


class _LaneSpeed:
    """The speed of a lane, from what it moves between two moments."""

    def __init__(self, statistics: Callable[[], _C.LaneStatistics] | None = None) -> None:
        self._statistics = statistics
        self._before = None if statistics is None else statistics()

    def bytes_per_second(self) -> float:
        """Infinite if too little has moved."""
        if self._statistics is None or self._before is None:
            return math.inf
        now = self._statistics()
        moved, busy = now.bytes - self._before.bytes, now.busy_seconds - self._before.busy_seconds
        return moved / busy if moved >= _LEAST_SAMPLE and busy > 0 else math.inf
