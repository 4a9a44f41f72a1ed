"""Fits a run's activations into its budget: measures a microbatch, plans the step, and falls back if it fails.

A step's largest microbatch runs under a stash that keeps nothing on the device, the *frugal* way, and is measured.
Steps have a plan for each size of that microbatch, and passes of a user's loop for each size of the model's arguments.
The planner (:mod:`hydra_ext.plan`) then chooses the size of rounds, the modules that are recomputed, and the stash's
room: how many bytes of saved tensors may stay. What stays can still leave if an allocation needs its memory, so a wrong
forecast costs time and rarely a retry. Where memory does run out, a microbatch is measured anew and planned with less
memory; after some failures the rest of the step runs the frugal way. Where no plan fits, all may stay until an
allocation needs its memory; if that fails once, such steps run the frugal way. Where that runs out of memory, too, its
backward goes block by block in rounds of one: autograd would hold the gradient of a weight that is used twice until its
last use.

Source: the options are those of Rotor (Beaumont et al., NeurIPS 2021) and of vDNN (Rhu et al., MICRO 2016).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from hydra_ext import _C
from hydra_ext.activations.groups import Span
from hydra_ext.activations.saving import Saving
from hydra_ext.blocks import Layout
from hydra_ext.runtime.placement.spilling import Spilling
from hydra_ext.runtime.rounds.choice import Decision
from hydra_ext.runtime.rounds.fibers import compute_seconds
from hydra_ext.runtime.rounds.microbatch import tensor_bytes
from hydra_ext.tracing import nothing_traced

if TYPE_CHECKING:
    from hydra_ext.activations.profiler import Profiler
    from hydra_ext.heads.calls import Heads
    from hydra_ext.plan.steps.forecast import Plan
    from hydra_ext.runtime.step_planner import PlannedStep, PlanTrials, StepPlanner, StepSeconds
    from hydra_ext.runtime.updates import Updates

STRICT = 1  # byte of room: saved tensors leave at once, and come when they are read
_MOST_FAILURES = 3  # before the frugal way
_NEAR = 1.3  # times the seconds of the best plan: one that is slower is not timed
_REPLANS = 3  # because a forecast was far off
_REMEDIES = "or shrink the batch, or leave round_size= in run.step and blocks= open"  # the rest has been tried
_MOST_RESCUES = 2  # before the frugal way stays: a model may need other memory each time, whatever was measured
_LOOK_AGAIN = 20  # frugal steps, or slow ones, after which a microbatch is measured anew: others may have come
_SLOW = 1.3  # times the seconds of a plan's shortest step
_MOST_UNUSED = 3  # forwards that are measured: a model that is not trained has no backward


class Rung(Enum):
    """How the next microbatches run."""

    GIVEN = "as the user says; else one is measured"
    MEASURED = "one, to be measured, the frugal way"
    PLANNED = "as planned"
    LOOSE = "one at a time; what could leave does when its memory is needed"
    FRUGAL = "one at a time, with nothing on the device that could leave"
    IN_PIECES = "likewise, in rounds, whose backward sends each gradient home at once"


_UNPLANNED = (Rung.LOOSE, Rung.FRUGAL, Rung.IN_PIECES)


class FitOwner(Protocol):
    """The run whose activations are fitted."""

    model: nn.Module
    layout: Layout
    core: _C.PagedModel
    device: torch.device
    budget: int
    updates: Updates | None

    def activation_bytes(self) -> int: ...
    def face_of(self, tensor: torch.Tensor) -> torch.Tensor | None: ...


@dataclass(frozen=True)
class StepKind:
    """What a plan depends on, beside what was measured: the step, and the user's arguments."""

    microbatches: int
    size: int | None
    recompute: bool


_LOOP = StepKind(1, 1, recompute=False)  # a loop of the user


@dataclass
class Setbacks:
    """What has failed.

    Attributes:
        failures: Rounds that ran out of memory, since a whole step went as planned or the frugal way.
        of_plan: Whether a planned one did, before a microbatch is measured anew.
        frugal_steps: Whole steps without a plan since a microbatch was measured.
        rescues: Steps that only the frugal way could end, since a whole one went as planned.
        futile: Times that the frugal way failed, likewise. Each doubles the steps before a microbatch is measured anew.
        slow_steps: One after the other that took much longer than planned ones had taken.
        slowdowns: Times that a microbatch was measured anew for that. Each doubles the steps before the next.
        unused: Forwards of a loop, one after the other, that were measured and had no backward.
    """

    failures: int = 0
    of_plan: bool = False
    frugal_steps: int = 0
    rescues: int = 0
    futile: int = 0
    slow_steps: int = 0
    slowdowns: int = 0
    unused: int = 0


@dataclass(frozen=True)
class StepSize:
    """Steps that are planned together.

    Attributes:
        looped: Of a loop of the user.
        bits: Of the number of bytes of the largest microbatch; in a loop, of the model's arguments.
    """

    looped: bool
    bits: int


class Steps:
    """What is known of steps whose microbatches are about equally large.

    Args:
        rung: The first one.
        make_planner: Makes their planner, when it is needed.
        may_be_loose: Steps without a plan may be, until a round fails so.
    """

    def __init__(self, rung: Rung, make_planner: Callable[[], StepPlanner], *, may_be_loose: bool) -> None:
        self._make_planner = make_planner
        self.rung = rung
        self.may_be_loose = may_be_loose
        self.setbacks = Setbacks()
        self.trials: dict[StepKind, PlanTrials] = {}

    @cached_property
    def planner(self) -> StepPlanner:
        return self._make_planner()


class Sizes:
    """Makes what is known of steps of each size, when the first one comes. The arguments are those of :class:`Fit`."""

    def __init__(self, owner: FitOwner, saving: Saving, spilling: Spilling | None) -> None:
        # On a GPU an allocation cannot wait until something has left, so rounds are planned there in any case.
        self._waits = owner.device.type != "cuda"
        self._make_planner = partial(_planner, owner, saving, spilling)
        self._known: dict[StepSize, Steps] = {}

    def steps_of(self, size: StepSize) -> Steps:
        if size not in self._known:
            first = Rung.GIVEN if self._waits else Rung.MEASURED
            self._known[size] = Steps(first, self._make_planner, may_be_loose=self._waits)
        return self._known[size]


class Fit:
    """The activations of one run. Its methods are called by the thread that makes the steps.

    Args:
        owner: The run.
        saving: Its stash.
        heads: Its model's, which run in rows where they do not fit.
        spilling: What keeps the host within its budget; None without one.

    Attributes:
        heads: As given.
        applied: The step as it runs now; None before a plan, or if none fits.
    """

    def __init__(self, owner: FitOwner, saving: Saving, heads: Heads, spilling: Spilling | None = None) -> None:
        self._owner = owner
        self.heads = heads
        owner.core.arrivals.timeline.advise(_REMEDIES)
        self._saving = saving
        self._sizes = Sizes(owner, saving, spilling)
        self._steps = self._sizes.steps_of(StepSize(looped=True, bits=0))
        self._kind = _LOOP
        self._pass: int | None = None  # of a loop, by the passes that its stash had then: its backward may follow
        self._profiler: Profiler | None = None  # what measures a microbatch now
        self._began: StepSeconds | None = None  # by the clocks
        self._nbytes: list[int] = []  # of the step's microbatches
        # An adaptive bound is not known before a backward, so a first microbatch says nothing of streams.
        self._warms_up = saving.given.may_compress and saving.learns
        self.applied: PlannedStep | None = None

    @property
    def planner(self) -> StepPlanner:
        """Of steps as they are now."""
        return self._steps.planner

    @property
    def _stalls(self) -> _C.StallLog | None:
        """Of a GPU's compute."""
        return self._owner.core.memory.backend.stalls

    def _turn_to(self, size: StepSize) -> None:
        steps = self._sizes.steps_of(size)
        if steps is not self._steps and self._profiler is not None:  # a forward without a backward
            self._stop_measuring()
        self._steps = steps

    def answer(self, peak_bytes: int) -> Plan | None:
        """Describes the step as it runs now, foreseen beside measured; None before a plan, or if none fits.

        ``peak_bytes``: of the device, in the last step.
        """
        from hydra_ext.plan.steps.answer import answer
        from hydra_ext.plan.steps.forecast import MeasuredStep

        planned = self.applied
        if planned is None or not planned.problem.profile.modules[""].calls:  # no forward was seen
            return None
        trials = self._steps.trials.get(self._kind)
        took = None if trials is None else trials.seconds.get(planned)
        if trials is not None:
            self.planner.update_seconds = trials.update_seconds
        problem, found = self.planner.forecast(planned)
        return answer(
            problem,
            self._owner.budget,
            found,
            measured=MeasuredStep(seconds=None if took is None else took.seconds, peak_bytes=peak_bytes),
            heads_in_rows=self.heads.in_rows,
        )

    # ---- run.step ---------------------------------------------------------------------------------------------------

    def step_begins(self, nbytes: Sequence[int], *, size: int | None, recompute: bool | None) -> None:
        """A step begins whose microbatches have tensors of these bytes.

        ``size`` and ``recompute`` are the user's arguments.
        """
        self._nbytes, self._pass = [*nbytes], None
        self._turn_to(StepSize(looped=False, bits=max(nbytes).bit_length()))
        self._kind = StepKind(len(nbytes), size, recompute is not False)
        setbacks = self._steps.setbacks
        if self._steps.rung in _UNPLANNED:
            at_once = setbacks.failures > 0 and setbacks.rescues < _MOST_RESCUES and not setbacks.futile
            if at_once or setbacks.frugal_steps >= _LOOK_AGAIN << setbacks.futile:
                self._steps.rung, setbacks.frugal_steps = Rung.MEASURED, 0
            else:
                setbacks.frugal_steps += 1
            setbacks.failures = 0
        self._began = None
        if self._steps.rung is Rung.PLANNED:
            if self._stalls is not None:
                self._stalls.start()
            self._began = self._clocks()

    def next(self, left: int, *, size: int | None, recompute: bool | None) -> Decision:
        """The round to run when ``left`` microbatches remain."""
        wanted = min(size or left, left)
        if self._steps.rung is Rung.GIVEN and (size is not None or recompute):
            self._go_as_given()
            return Decision(wanted, recompute=recompute is True)
        if self._steps.rung is Rung.PLANNED:
            trials = self._trials_now()
            if trials is not None:
                planned = trials.planned
                self._apply(planned, keeps_all=planned.keeps_all and not self._saving.given.moves)
                together = min(size or planned.round_size, left)
                return Decision(together, recompute=recompute is True, alone=planned.round_size == 1 and not recompute)
            self._steps.rung = Rung.LOOSE if self._steps.may_be_loose else Rung.FRUGAL
        self._go_frugal(self._owner.budget if self._steps.rung is Rung.LOOSE else STRICT)
        if self._steps.rung is Rung.IN_PIECES:
            return Decision(min(size or 1, left), recompute=False)
        if self._steps.rung not in (Rung.LOOSE, Rung.FRUGAL):
            self._steps.rung = Rung.MEASURED
            if self._nbytes[-left] == max(self._nbytes):  # by a smaller one's figures the largest would not fit
                self._measure()
            return Decision(1, recompute=False, alone=True)
        return Decision(wanted, recompute=False, alone=size is None or size == 1)

    def learn(self, _decision: Decision, *, held: int, peak: int) -> None:
        """A round has ended."""
        self._settle()

    def fail(self, decision: Decision, *, size: int | None, recompute: bool | None, looped: bool) -> str:
        """Notes that a round has run out of memory. Returns what was tried if nothing is left to try."""
        self._stop_measuring()
        if self.heads.be_wary():
            self._steps.rung, self._began = Rung.MEASURED, None
            return ""
        self._steps.setbacks.failures += 1
        self._began = None
        failed, self._steps.rung = self._steps.rung, Rung.FRUGAL
        if failed is Rung.LOOSE:
            self._steps.may_be_loose = False
            return ""
        if failed in (Rung.GIVEN, Rung.PLANNED):
            self._steps.setbacks.of_plan = failed is Rung.PLANNED
            if self._steps.setbacks.failures < _MOST_FAILURES:
                self._steps.rung = Rung.MEASURED
            else:
                self._steps.setbacks.rescues += 1
            return ""
        if failed is Rung.MEASURED or (failed is Rung.FRUGAL and (decision.alone or looped)):
            self._steps.setbacks.futile += 1
            if not looped:
                self._steps.rung = Rung.IN_PIECES
                return ""
        together = "one at a time" if decision.size == 1 or looped else f"in rounds of {decision.size}"
        return f"run.step ran the microbatches {together}, with nothing on the device that could leave it."

    def step_ended(self) -> None:
        """A step has ended well. Plans that forecasts cannot tell apart are timed, and the fastest one stays.

        If compute takes half as long again as foreseen, or two thirds, those plans were made for another machine:
        others are made at once.
        """
        trials = self._steps.trials.get(self._kind)
        if self._began is None or trials is None:
            return
        setbacks = self._steps.setbacks
        setbacks.failures = setbacks.rescues = setbacks.futile = 0
        took = self._clocks().since(self._began)
        if self._stalls is not None:
            self._stalls.stop()
        refused = [] if trials.has_begun else self._refused(trials.planned)
        if refused:
            self.planner.refuse(refused)
            self._steps.trials.clear()
            return
        planned = trials.planned
        all_timed = trials.note(took)
        is_far_off = planned in trials.seconds and trials.usual is None and planned.is_far_off(took)
        if not all_timed and not (is_far_off and trials.replans < _REPLANS):
            self._watch(took.seconds, trials.usual)
            return
        if trials.replans == _REPLANS:
            return
        self.planner.update_seconds = trials.update_seconds
        judged = trials.planned if all_timed else planned
        if self.planner.learn(judged, trials.seconds[judged]):
            trials.replans += 1
            trials.try_also(self._plans())

    def _refused(self, planned: PlannedStep) -> list[str]:
        """The segments that were to run again, and do not: the first step has shown that they would differ."""
        chosen = {name: self._module_or_group(planned, name) for name in planned.recomputed}
        return [name for name, each in chosen.items() if each is not None and self._saving.refuses(each)]

    def _watch(self, seconds: float, usual: float | None) -> None:
        """Measures a microbatch anew if steps have become slower for good: of others the best plan may be another."""
        setbacks = self._steps.setbacks
        if usual is None or seconds <= _SLOW * usual:
            setbacks.slow_steps = 0
            return
        setbacks.slow_steps += 1
        if setbacks.slow_steps >= _LOOK_AGAIN << setbacks.slowdowns:
            setbacks.slow_steps = 0
            setbacks.slowdowns += 1
            self._steps.rung = Rung.MEASURED

    def _clocks(self) -> StepSeconds:
        from hydra_ext.runtime.step_planner import StepSeconds

        now, stalls = time.perf_counter(), self._stalls
        computed = compute_seconds() if stalls is None else now - stalls.seconds(0, stalls.count)
        return StepSeconds(now, computed, self._owner.core.update.seconds)

    # ---- a loop of the user -----------------------------------------------------------------------------------------

    @nothing_traced
    def forward_begins(self, arguments: Any) -> None:
        """A forward outside ``run.step`` begins, whose backward may follow. Several of one backward share a plan."""
        if self._graph_is_gone():
            self.pass_fails()
        if self._pass is None:
            self._turn_to(StepSize(looped=True, bits=tensor_bytes(arguments).bit_length()))
            self._pass = self._saving.passes
        self._kind = _LOOP
        self.heads.is_wary = True  # nothing can be undone there
        if self._steps.rung in (Rung.GIVEN, Rung.MEASURED) and self._profiler is None:
            self._go_frugal()
            if self._steps.setbacks.unused < _MOST_UNUSED:
                self._measure()
        elif self._steps.rung is Rung.PLANNED:
            trials = self._trials_now()
            if trials is None:
                self._steps.rung = Rung.FRUGAL
                self._go_frugal()
            else:  # nothing can be undone, so even if all is kept it can still leave
                self._apply(trials.planned, keeps_all=False)
        elif self._steps.rung in _UNPLANNED:  # a step of another size may have left its plan
            self._go_frugal()

    def _graph_is_gone(self) -> bool:
        """Whether no backward can follow the forwards of this pass, as after an evaluation."""
        measured = self._profiler if self._profiler is not None and self._profiler.has_run else None
        has_saved = measured is None or measured.has_saved
        return self._pass is not None and (self._saving.passes != self._pass or not has_saved)

    def pass_fails(self) -> None:
        """A pass outside ``run.step`` has raised, or has no backward: its measurement says nothing of others."""
        if self._profiler is not None and self._profiler.runs:
            return  # an inner call of the model
        self._pass = None
        if self._stop_measuring() is not None:
            self._steps.setbacks.unused += 1

    def backward_ended(self) -> None:
        """A backward outside ``run.step`` has ended, perhaps one that a forward has made."""
        self._pass, self._steps.setbacks.unused = None, 0
        profiler = self._profiler
        if profiler is not None and profiler.has_run and not profiler.runs:
            self._settle()

    # ---- rungs ------------------------------------------------------------------------------------------------------

    def _go_as_given(self) -> None:
        given, before = self._saving.given, self.applied
        if before is not None or not given.follows:
            self.applied = None
            self._saving.leaves_all_on_device = False
            given.follow(())
            if before is not None or given.recomputed:
                self._saving.recompute((), self._owner.device)
        self._saving.set_room(self._owner.budget)

    def _go_frugal(self, room: int = STRICT) -> None:
        self._stop_measuring()  # what an error of the user has left
        self.applied = None
        self._saving.leaves_all_on_device = False
        self._saving.given.set_aside()
        self._saving.recompute((), self._owner.device)
        self._saving.set_room(room)

    def _measure(self) -> None:
        self._steps.rung = Rung.MEASURED
        self._owner.core.pager.forget_activations()  # what is recorded has to be this microbatch's
        self._saving.given.set_aside(compress=True)
        self._profiler = self.planner.measure()
        self._saving.measure(self._profiler)

    def _stop_measuring(self) -> Profiler | None:
        """Returns what has measured."""
        profiler, self._profiler = self._profiler, None
        self._saving.measure(None)
        return profiler

    def _settle(self) -> None:
        if self._steps.rung is Rung.MEASURED and self._profiler is not None:
            if self._warms_up:
                self._warms_up = False
                self._stop_measuring()  # another one is measured
                return
            self.planner.settle(self._stop_measuring(), tighten=self._steps.setbacks.of_plan)
            self._steps.setbacks.of_plan = False
            self._steps.rung = Rung.PLANNED
            self._steps.trials.clear()

    def _apply(self, planned: PlannedStep, *, keeps_all: bool) -> None:
        self._saving.leaves_all_on_device = keeps_all
        if planned is self.applied:
            return
        self._owner.core.pager.forget_activations()
        modules = dict(self._owner.model.named_modules())
        self._saving.given.follow([modules[name] for name in planned.compressed if name in modules])
        given = self._saving.given.policies
        again = [self._module_or_group(planned, name) for name in planned.recomputed if not given.recomputes(name)]
        pieces = [modules[name] for name in planned.pieces if name in modules]
        self._saving.recompute([each for each in again if each is not None], self._owner.device, pieces=pieces)
        self._saving.set_room(planned.room)
        self.applied = planned

    def _module_or_group(self, planned: PlannedStep, name: str) -> nn.Module | Span | None:
        """None if others have replaced it since it was measured."""
        modules = dict(self._owner.model.named_modules())
        place = planned.problem.profile.place_of(name)
        if place is None:
            return modules.get(name)
        found: Any = modules.get(place.sequential)
        is_there = isinstance(found, nn.Sequential) and place.end <= len(found)
        return Span(found, place.first, place.end) if is_there else None

    # ---- plans ------------------------------------------------------------------------------------------------------

    def _trials_now(self) -> PlanTrials | None:
        """The plans for the present kind of step; None if none fits."""
        if self._kind not in self._steps.trials:
            from hydra_ext.runtime.step_planner import PlanTrials

            plans = self._plans()
            if plans:
                self._steps.trials[self._kind] = PlanTrials(plans)
        return self._steps.trials.get(self._kind)

    def _plans(self) -> list[PlannedStep]:
        """The best plan, and the best one with the other kind of rounds if it is hardly slower. Empty if none fits."""
        kind, count, planner = self._kind, self._kind.microbatches, self.planner
        if kind is _LOOP:
            # Nothing can be undone there: not what a second forward changes outside the model, nor one without memory.
            plan = planner.plan(1, [1], recompute=False)
            return [] if plan is None else [plan]
        sizes = [] if kind.size is None else [min(kind.size, count)]
        best = planner.plan(count, sizes, recompute=kind.recompute)
        if best is None or kind.size is not None or count == 1:
            return [] if best is None else [best]
        sizes = [1] if best.round_size > 1 else _sizes_of_rounds(count)
        other = planner.plan(count, sizes, recompute=kind.recompute)
        return [best, other] if other is not None and other.seconds <= _NEAR * best.seconds else [best]


def _planner(owner: FitOwner, saving: Saving, spilling: Spilling | None) -> StepPlanner:
    from hydra_ext.runtime.step_planner import StepPlanner

    return StepPlanner(owner, saving, spilling)


def _sizes_of_rounds(count: int) -> list[int]:
    """Sizes that are worth a trial, of more than one microbatch: powers of two, a third of all, a half, and all."""
    powers = (1 << power for power in range(1, count.bit_length()))
    return sorted({*powers, -(-count // 3), -(-count // 2), count} - {1})
