"""Plans the steps of a run from what one microbatch cost there, and times plans that forecasts cannot tell apart."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from hydra_ext import _C, codec
from hydra_ext.activations.given import CodedBytes, GivenTreatments
from hydra_ext.activations.profiler import Profiler
from hydra_ext.activations.saving import Saving
from hydra_ext.blocks import Block
from hydra_ext.errors import PlanError
from hydra_ext.plan.segments import Coding
from hydra_ext.plan.steps.problem import Homes, StepProblem, StepSetting, Wishes
from hydra_ext.profile import ModuleFigures, Profile
from hydra_ext.profile.figures import BlockFigures
from hydra_ext.runtime.fit import STRICT, FitOwner
from hydra_ext.runtime.placement.residents import resident_bytes
from hydra_ext.runtime.placement.spilling import Spilling

logger = logging.getLogger(__name__)

_SHARE = 0.97  # of the budget that a plan may take
_CUDA_SHARE = 0.9  # there: memory that the allocator cannot use, since it is in pieces
_TIGHTER = 0.94  # of that share, after a failure that no change of shapes explains
_OFF = 0.3  # a step whose forecast, made anew, differs by more is planned again (on a GPU: one that took so)
_COMPUTE_OFF = 0.1  # so is one whose compute does, where that is known
_COMPUTE_FAR_OFF = 0.5  # and at once if compute does so
_TURNS = 2  # of each plan that is timed, before they are compared
_TIMED = 2  # steps of a turn that count
_LEAST_SAMPLE = 2**16  # bytes from which a lane's speed is measured
_CODED_NUMBERS = 2**18  # that are compressed to find the codec's speed
_CODING_TRIALS = 3
_NOTHING = Profile(modules={"": ModuleFigures(name="")})  # of a model whose forward was not seen


@dataclass(frozen=True)
class StepSeconds:
    """What a step took, or a moment by the same clocks.

    Attributes:
        seconds: In all.
        computed: Of the thread that computes, without waits; on a GPU, of the step without stalls of its stream.
        updated: Of the threads that update weights behind the next forward.
    """

    seconds: float
    computed: float | None = None
    updated: float = 0.0

    def since(self, begin: StepSeconds) -> StepSeconds:
        computed = None if self.computed is None or begin.computed is None else self.computed - begin.computed
        return StepSeconds(self.seconds - begin.seconds, computed, self.updated - begin.updated)

    def or_less(self, other: StepSeconds) -> StepSeconds:
        """The less of each, but for updates: what runs behind a forward counts there, or in the next step."""
        computed = None if self.computed is None or other.computed is None else min(self.computed, other.computed)
        return StepSeconds(min(self.seconds, other.seconds), computed)


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """What the planner has chosen for a step. Two are equal if steps run alike.

    Attributes:
        problem: What the planner was asked.
        found: Its answer.
        budget: Of the run, in bytes.
    """

    problem: StepProblem
    found: _C.ActivationPlan
    budget: int

    @cached_property
    def room(self) -> int:
        """Device bytes of saved tensors that may stay: those that the plan keeps, and those on their way.

        The stash keeps the newest ones, whatever the plan has kept: they are read first.
        """
        room = self.found.stash_bytes + self.found.round_size * self.problem.kept_bytes(self.found)
        return self.budget if self.keeps_all else max(STRICT, room)

    @property
    def names(self) -> tuple[str, ...]:
        """The segments."""
        return self.problem.names[self.found.cut]

    @property
    def options(self) -> list[_C.ActivationOption]:
        """What becomes of what each segment saves."""
        return self.found.options

    @property
    def round_size(self) -> int:
        """Microbatches that run together; 1 for one after the other."""
        return self.found.round_size

    @property
    def seconds(self) -> float:
        return self.found.seconds

    @property
    def keeps_all(self) -> bool:
        keep, treated = _C.ActivationOption.KEEP, zip(self.problem.segments[self.found.cut], self.options, strict=True)
        return all(option == keep or segment.figures.saved.fresh == 0 for segment, option in treated)

    @property
    def recomputed(self) -> list[str]:
        """The segments that run again in backward."""
        again = (_C.ActivationOption.RECOMPUTE, _C.ActivationOption.RECOMPUTE_OFFLOADED)
        return [name for name, option in zip(self.names, self.options, strict=True) if option in again]

    @property
    def pieces(self) -> list[str]:
        """The modules inside of these that run a third time."""
        again = {*self.recomputed}
        nested = [each.freedom.nested for each in self.problem.segments[self.found.cut] if each.name in again]
        return [piece for each in nested if each is not None for piece in each.pieces]

    @property
    def compressed(self) -> list[str]:
        """The modules that are compressed, each with those inside it."""
        options = zip(self.names, self.options, strict=True)
        names = [name for name, option in options if option == _C.ActivationOption.COMPRESS]
        return [member for name in names for member in self.problem.profile.members(name)]

    def slowness(self, took: StepSeconds, step: float) -> float | None:
        """Measured seconds of compute for each one of the profile, if the forecast was far off; None if it was not.

        The microbatch that was measured was the first one, which also takes what is done once: memory is touched for
        the first time, kernels are chosen.

        Args:
            took: Measured.
            step: Foreseen seconds of the step, with all that is known now.
        """
        foreseen, computed = self.found.compute_seconds, took.computed
        if computed is None:
            if not _differs(took.seconds, step, _OFF):
                return None
            computed = took.seconds - (step - foreseen)
        elif not _differs(computed, foreseen, _COMPUTE_OFF):
            return None
        return self.problem.setting.slowness * min(max(computed / max(foreseen, 1e-9), 0.5), 2.0)

    def is_far_off(self, took: StepSeconds) -> bool:
        """Whether compute took half as long again as foreseen, or two thirds; False where that is not known."""
        return took.computed is not None and _differs(took.computed, self.found.compute_seconds, _COMPUTE_FAR_OFF)

    @cached_property
    def _treatment(self) -> tuple[object, ...]:
        """All that a step follows: the stash has a room, and does not know which segments are to stay."""
        return tuple(self.recomputed), tuple(self.compressed), tuple(self.pieces), self.round_size, self.room

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlannedStep) and self._treatment == other._treatment

    def __hash__(self) -> int:
        return hash(self._treatment)


class PlanTrials:
    """The plans for steps of one kind, and their times.

    Plans take turns, since a machine is faster at some times than at others. Of a turn's steps the first is slower than
    those that follow and not counted. The shortest of the others is the plan's time: what else the machine does makes a
    step longer and never shorter.

    Attributes:
        planned: The step as it runs now.
        seconds: Of the shortest step by each plan so far; of its compute likewise.
        update_seconds: Of updates behind a forward, in the mean over all steps.
        replans: Number of times that a forecast was far off.
    """

    def __init__(self, plans: list[PlannedStep]) -> None:
        self.seconds: dict[PlannedStep, StepSeconds] = {}
        self.replans = 0
        self._updated, self._steps = 0.0, 0
        self._turns = plans * _TURNS if len(plans) > 1 else [*plans]  # to come
        self.planned = self._turns.pop(0)
        self._is_cold = True
        self._left = _TIMED  # steps of this turn

    @property
    def has_begun(self) -> bool:
        """Whether a step has run as planned now."""
        return not self._is_cold

    @property
    def update_seconds(self) -> float:
        return self._updated / max(self._steps, 1)

    @property
    def usual(self) -> float | None:
        """Seconds that a step takes by now; None while plans are timed."""
        return self.seconds[self.planned].seconds if self._left == 0 else None

    def note(self, took: StepSeconds) -> bool:
        """Notes a step's time. Returns whether all plans have been timed now: the fastest is taken."""
        self._updated += took.updated
        self._steps += 1
        if self._is_cold:
            self._is_cold = False
            return False
        self.seconds[self.planned] = took.or_less(self.seconds.get(self.planned, took))
        if self._left == 0:
            return False
        self._left -= 1
        if self._left == 0 and self._turns:
            self._begin_turn()
        if self._left > 0:
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


def _differs(measured: float, foreseen: float, share: float) -> bool:
    return foreseen > 0 and abs(math.log(max(measured, 1e-9) / foreseen)) > math.log(1 + share)


class StepPlanner:
    """Measures a microbatch, and plans steps.

    Args:
        owner: The run.
        saving: Its stash.
        spilling: What keeps the host within its budget; None without one.

    Attributes:
        profile: What one microbatch cost; None before it was measured.
        update_seconds: Of an update behind a forward.
    """

    def __init__(self, owner: FitOwner, saving: Saving, spilling: Spilling | None) -> None:
        self._owner = owner
        self._saving = saving
        self._spilling = spilling
        self._coding = CodingFigures(saving.given, owner.device)
        self._budget = owner.budget
        self._share = _CUDA_SHARE if owner.device.type == "cuda" else _SHARE
        self._lanes = [_LaneSpeed()] * 3  # to the device, to the host, and the disk's
        self.profile: Profile | None = None
        self.update_seconds = 0.0  # not known before there was one
        self._slowness = 1.0  # seconds of compute for each one of the profile

    def measure(self) -> Profiler:
        """Returns what measures a microbatch, for :meth:`settle`."""
        owner = self._owner
        in_use = lambda: owner.activation_bytes()  # noqa: E731 - the method itself would hold the run
        profiler = Profiler(owner.model, owner.layout, owner.core, in_use, owner.device)
        self._coding.begin()
        backend = owner.core.memory.backend
        saving = self._saving
        self._lanes = [
            _LaneSpeed(lambda: _moved(backend.to_device_statistics)),
            _LaneSpeed(lambda: _moved(backend.to_host_statistics)),
            _LaneSpeed(lambda: _moved_by_disk(saving.copies())),
        ]
        return profiler

    def settle(self, profiler: Profiler | None, *, tighten: bool) -> None:
        """Takes what was measured: nothing if no forward was seen. ``tighten``: a plan has run out of memory before."""
        before, self.profile, self._slowness = self.profile, _NOTHING, 1.0
        if profiler is not None and profiler.has_run:
            self._coding.end()
            self.profile = profiler.profile([self._figures_of(block) for block in self._owner.layout.blocks])
        is_alike = before is not None and before.modules[""].saved == self.profile.modules[""].saved
        self._share *= _TIGHTER if tighten and is_alike else 1.0

    def learn(self, planned: PlannedStep, took: StepSeconds) -> bool:
        """Corrects forecasts by what a planned step took. Returns whether they were far off."""
        _, judged = self.forecast(planned)
        slowness = planned.slowness(took, judged.seconds)
        if slowness is not None and _differs(slowness, self._slowness, _COMPUTE_OFF):
            self._slowness = slowness
            return True
        return _differs(judged.seconds, planned.seconds, _OFF)

    def _figures_of(self, block: Block) -> BlockFigures:
        faces = [self._owner.face_of(parameter) for _, parameter in block.parameters]
        sizes = [0 if face is None else face.nbytes for face in faces]
        trained = [parameter.requires_grad for _, parameter in block.parameters]
        return BlockFigures(
            name=block.name,
            weight_bytes=sum(sizes),
            gradient_bytes=sum(size for size, needs in zip(sizes, trained, strict=True) if needs),
        )

    def refuse(self, names: Sequence[str]) -> None:
        """No plan from now on has these segments run again, until another microbatch is measured."""
        if self.profile is not None:
            self.profile = self.profile.refusing(names)

    def plan(self, microbatches: int, round_sizes: Sequence[int], *, recompute: bool) -> PlannedStep | None:
        """The best plan with one of these sizes of rounds; None if none fits, or the planner takes no such step."""
        if self.profile is None:
            return None
        try:
            problem = self._problem(self.profile, microbatches, tuple(round_sizes), recompute=recompute)
            found = problem.solve(int(self._budget * self._share))
        except PlanError as error:
            logger.info("no plan for a step's activations: %s", error)
            return None
        return PlannedStep(problem, found, self._budget)

    def forecast(self, planned: PlannedStep) -> tuple[StepProblem, _C.ActivationPlan]:
        """Judges a planned step anew, with the speeds that are known now."""
        before = planned.problem
        if before.profile is not self.profile:
            return before, planned.found
        setting = before.setting
        now = self._problem(before.profile, setting.microbatches, setting.round_sizes, recompute=setting.recompute)
        return now, now.judge(planned.found, int(self._budget * self._share))

    def _problem(
        self, profile: Profile, microbatches: int, round_sizes: tuple[int, ...], *, recompute: bool
    ) -> StepProblem:
        to_device, to_host, disk = (lane.bytes_per_second() for lane in self._lanes)
        setting = StepSetting(
            microbatches=microbatches,
            to_device=to_device,
            to_host=to_host,
            buffer_bytes=resident_bytes(self._owner.model, self._owner.layout),
            update_seconds=self.update_seconds,
            round_sizes=round_sizes,
            recompute=recompute,
            slowness=self._slowness,
        )
        wishes = Wishes(given=self._saving.given.policies, coding_of=self._coding.of)
        return StepProblem(profile, setting, self._homes(profile, disk), wishes=wishes)

    def _homes(self, profile: Profile, disk: float) -> Homes:
        """What host and device hold beside saved tensors; on the host without a budget weights and gradients only."""
        if self._spilling is None:
            updates = self._owner.updates
            on_device, left_free = (0, 0) if updates is None else updates.homes.demand()
            held = sum(block.weight_bytes + block.gradient_bytes for block in profile.blocks)
            return Homes(nbytes=held, on_device=on_device, left_free=left_free)
        known = 0.0 if disk == math.inf else disk
        return Homes(nbytes=self._spilling.plan.total, host_budget=self._spilling.budget, disk=known)


def _moved(lane: _C.LaneStatistics) -> tuple[int, float]:
    return lane.bytes, lane.busy_seconds


def _moved_by_disk(copies: _C.CopyStatistics) -> tuple[int, float]:
    return copies.written_bytes + copies.read_bytes, copies.writing_seconds + copies.reading_seconds


class _LaneSpeed:
    """The speed of a lane, from the bytes that it moves between two moments, and the seconds in which it does."""

    def __init__(self, moved: Callable[[], tuple[int, float]] | None = None) -> None:
        self._moved = moved
        self._before = None if moved is None else moved()

    def bytes_per_second(self) -> float:
        """Infinite if too little has moved."""
        if self._moved is None or self._before is None:
            return math.inf
        moved, busy = (now - before for now, before in zip(self._moved(), self._before, strict=True))
        return moved / busy if moved >= _LEAST_SAMPLE and busy > 0 else math.inf


class CodingFigures:
    """Ratios of the modules that may be compressed, from a measured microbatch, and the codec's speed.

    Args:
        given: What the user allows.
        device: Device that compresses.
    """

    def __init__(self, given: GivenTreatments, device: torch.device) -> None:
        self._given = given
        self._device = device
        self._before: dict[str, CodedBytes] = {}
        self._found: dict[str, CodedBytes] = {}
        self._speed: float | None = None

    def begin(self) -> None:
        """A microbatch begins, in which all that may be is compressed."""
        self._before = self._given.coded()

    def end(self) -> None:
        """Its backward has ended."""
        now = self._given.coded()
        self._found = {name: coded - self._before.get(name, CodedBytes()) for name, coded in now.items()}

    def of(self, members: Sequence[str], nbytes: int) -> Coding | None:
        """The coding of modules that save so many fresh bytes together; None if none of these were compressed."""
        inside = [
            coded
            for name, coded in self._found.items()
            if any(name == member or name.startswith(f"{member}.") for member in members)
        ]
        coded = sum(inside, CodedBytes())
        if not coded.encoded:
            return None
        whole = coded.encoded + coded.exact
        return Coding(
            stream_bytes=nbytes * (coded.streams + coded.exact) // whole,
            seconds=nbytes * coded.encoded / whole / self._bytes_per_second(),
        )

    def _bytes_per_second(self) -> float:
        """Of one number that is compressed and decoded."""
        if self._speed is None:
            generator = torch.Generator().manual_seed(0)
            numbers = torch.randn(_CODED_NUMBERS, generator=generator).to(self._device)
            self._speed = numbers.nbytes / min(self._seconds(numbers) for _ in range(_CODING_TRIALS))
        return self._speed

    def _seconds(self, numbers: torch.Tensor) -> float:
        self._settle()
        began = time.perf_counter()
        codec.decompress(codec.compress(numbers, error_bound=0.01))
        self._settle()
        return max(time.perf_counter() - began, 1e-9)

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
