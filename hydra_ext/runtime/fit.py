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
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import nn

from hydra_ext import _C
from hydra_ext.activations.profiler import Profiler
from hydra_ext.activations.saving import Saving
from hydra_ext.blocks import Layout
from hydra_ext.errors import PlanError
from hydra_ext.plan.steps.problem import StepProblem, StepSetting
from hydra_ext.profile import ModuleFigures, Profile
from hydra_ext.runtime.placement.residents import buffer_bytes
from hydra_ext.runtime.rounds.choice import Decision

logger = logging.getLogger(__name__)

_STRICT = 1  # byte of room: saved tensors leave at once, and come when they are read
_SHARE = 0.97  # of the budget that a plan may take
_CUDA_SHARE = 0.9  # there: memory that the allocator cannot use, since it is in pieces
_TIGHTER = 0.94  # of that share, after a failure that no change of shapes explains
_MOST_FAILURES = 3  # in one step, before the frugal way
_OFF = 0.3  # a step that differs by more from its forecast is planned again; a plan that is slower is not timed
_REPLANS = 3  # for this reason, without new measurements
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
    """

    names: tuple[str, ...]
    options: tuple[_C.ActivationOption, ...]
    round_size: int
    room: int
    seconds: float
    compute_seconds: float
    peak_bytes: int

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


class Fit:
    """The activations of one run. Its methods are called by the thread that makes the steps.

    Args:
        owner: The run.
        saving: Its stash.
        budget: Device bytes.

    Attributes:
        profile: What one microbatch cost; None before it was measured.
        planned: The step as it runs now; None before.
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
        self._replans = 0
        self._failures = 0
        self._times: dict[PlannedStep, float] = {}  # seconds of a step
        self._candidates: list[PlannedStep] = []  # to be timed
        self._warm: PlannedStep | None = None  # the one by which the last step ran
        self._profiler: Profiler | None = None
        self._asked: _Asked | None = None
        self._began: float | None = None
        self._lanes: tuple[_LaneSpeed, _LaneSpeed] = (_LaneSpeed(), _LaneSpeed())
        self.profile: Profile | None = None
        self.planned: PlannedStep | None = None
        self.plans = 0

    # ---- run.step ---------------------------------------------------------------------------------------------------

    def step_begins(self, count: int, *, size: int | None, recompute: bool | None) -> None:
        """A step of ``count`` microbatches begins; ``size`` and ``recompute`` are the user's arguments."""
        self._failures = 0
        if self._rung is Rung.FRUGAL:
            self._rung = Rung.MEASURED
        asked = _Asked(count, size, recompute is not False)
        if asked != self._asked:
            self._asked = asked
            self._forget_plans()
        self._began = time.perf_counter() if self._rung is Rung.PLANNED else None

    def next(self, left: int, *, size: int | None, recompute: bool | None) -> Decision:
        """The round to run when ``left`` microbatches remain."""
        wanted = min(size or left, left)
        if self._rung is Rung.GIVEN and (size is not None or recompute):
            self._saving.set_room(self._budget)
            return Decision(wanted, recompute=recompute is True)
        if self._rung is Rung.PLANNED:
            if self.planned is None:
                self.planned, *self._candidates = self._plans() or [None]
            planned = self.planned
            if planned is not None:
                self._apply(planned)
                together = min(size or planned.round_size, left)
                return Decision(together, recompute=recompute is True, alone=planned.round_size == 1 and not recompute)
            self._rung = Rung.FRUGAL
        self._saving.leaves_all_on_device = False
        self._saving.recompute((), self._owner.device)
        self._saving.set_room(_STRICT)
        if self._rung is not Rung.FRUGAL:
            self._rung = Rung.MEASURED
            self._measure()
            return Decision(1, recompute=False, alone=True)
        return Decision(wanted, recompute=False, alone=size is None or size == 1)

    def learn(self, _decision: Decision, *, held: int = 0, peak: int = 0) -> None:
        """A round has ended."""
        self._settle()

    def fail(self, _decision: Decision, *, size: int | None, recompute: bool | None, looped: bool) -> str:
        """Notes that a round has run out of memory. Returns what was tried if nothing is left to try."""
        self._profiler = None
        self._saving.measure(None)
        self._failures += 1
        failed, self._rung = self._rung, Rung.FRUGAL
        self._began = None
        self._forget_plans()
        if failed in (Rung.GIVEN, Rung.PLANNED):
            if self._failures < _MOST_FAILURES:
                self._rung = Rung.MEASURED
            return ""
        together = "one at a time" if size is None or size == 1 else f"in rounds of {size}"
        return f"run.step ran the microbatches {together}, with nothing on the device that could leave it."

    def step_ended(self) -> None:
        """A step has ended well. Plans that a forecast cannot tell apart are timed, and the fastest one stays."""
        if self._began is None or self.planned is None:
            return
        seconds = time.perf_counter() - self._began
        if self.planned is not self._warm:  # a first step as planned is slower than those that follow
            self._warm = self.planned
            return
        known = self._times.get(self.planned, math.inf)
        self._times[self.planned] = min(known, seconds)
        if known < math.inf and not self._candidates:
            return
        if not self._candidates and self._replans < _REPLANS and self._is_off(self.planned, seconds):
            self._replans += 1
            self._candidates = [plan for plan in self._plans() if plan not in self._times]
        self.planned = self._candidates.pop(0) if self._candidates else min(self._times, key=self._times.__getitem__)

    def _is_off(self, planned: PlannedStep, seconds: float) -> bool:
        """Whether the forecast was far off. Takes compute to be slower or faster from now on, if compute binds."""
        ratio = seconds / planned.seconds if planned.seconds > 0 else 1.0
        if abs(math.log(ratio)) <= math.log(1 + _OFF):
            return False
        rest = planned.seconds - planned.compute_seconds
        self._slowness *= min(max((seconds - rest) / max(planned.compute_seconds, 1e-9), 0.5), 2.0)
        return True

    # ---- a loop of the user -----------------------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """A forward outside ``run.step`` begins, whose backward may follow."""
        profiler = self._profiler
        if self._rung in (Rung.GIVEN, Rung.MEASURED) and (profiler is None or profiler.failed):
            self._rung = Rung.MEASURED
            self._saving.set_room(_STRICT)
            self._measure()
        elif self._rung is Rung.PLANNED and self._asked is None:
            self._asked = _Asked(1, 1, recompute=True)
            self.planned = next(iter(self._plans()), None)
            if self.planned is not None:
                self._apply(self.planned)
                self._saving.leaves_all_on_device = False  # nothing can be undone: what is kept can still leave

    def backward_ended(self) -> None:
        """A backward outside ``run.step`` has ended, perhaps one that a forward has made."""
        if self._profiler is not None and self._profiler.has_run and not self._profiler.runs:
            self._settle()

    # ---- measuring --------------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        owner = self._owner
        self._profiler = Profiler(owner.model, owner.layout, owner.core, owner.activation_bytes, owner.device)
        self._saving.measure(self._profiler)
        backend = owner.core.memory.backend
        self._lanes = (
            _LaneSpeed(lambda: backend.to_device_statistics),
            _LaneSpeed(lambda: backend.to_host_statistics),
        )

    def _settle(self) -> None:
        """Takes what was measured. A plan for nothing follows if no forward was seen, or hooks of others were there."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        self._saving.measure(None)
        known, self.profile = self.profile, profiler.profile() if profiler.has_run else _NOTHING
        if known is not None and known.modules[""].saved == self.profile.modules[""].saved:
            self._share *= _TIGHTER
        self._rung = Rung.PLANNED
        self._forget_plans()

    def _forget_plans(self) -> None:
        self.planned, self._warm = None, None
        self._candidates.clear()
        self._times.clear()

    # ---- planning ---------------------------------------------------------------------------------------------------

    def _plans(self) -> list[PlannedStep]:
        """The best plan, and the best one with the other kind of rounds if it is hardly slower. Empty if none fits."""
        if self.profile is None or self._asked is None:
            return []
        asked = self._asked
        best = self._plan(self.profile, asked, [] if asked.size is None else [min(asked.size, asked.microbatches)])
        if best is None or asked.size is not None or asked.microbatches == 1:
            return [] if best is None else [best]
        others = [1] if best.round_size > 1 else list(range(2, asked.microbatches + 1))
        other = self._plan(self.profile, asked, others)
        near = other is not None and other.seconds <= (1 + _OFF) * best.seconds
        return [best, other] if near and other is not None else [best]

    def _plan(self, profile: Profile, asked: _Asked, round_sizes: list[int]) -> PlannedStep | None:
        to_device, to_host = (lane.bytes_per_second() for lane in self._lanes)
        setting = StepSetting(
            microbatches=asked.microbatches,
            to_device=to_device,
            to_host=to_host,
            buffer_bytes=buffer_bytes(self._owner.model),
            round_sizes=tuple(round_sizes),
            recompute=asked.recompute,
            slowness=self._slowness,
        )
        problem = StepProblem(profile, setting)
        try:
            found = problem.solve(int(self._budget * self._share))
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
        )
        logger.info("activations: %s", planned)
        return planned

    def _apply(self, planned: PlannedStep) -> None:
        modules = dict(self._owner.model.named_modules())
        self._saving.recompute([modules[name] for name in planned.recomputed], self._owner.device)
        self._saving.set_room(planned.room)
        self._saving.leaves_all_on_device = planned.keeps_all


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
