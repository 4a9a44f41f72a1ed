"""A model's training step as a problem of the planner of activations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from hydra_ext import _C
from hydra_ext.errors import BudgetTooSmall, HostBudgetTooSmall, PlanError
from hydra_ext.plan.segments import CodingOf, Segment, in_pieces, needs_again, segments_of
from hydra_ext.plan.steps.memory import moved_bytes
from hydra_ext.policy import GivenPolicies
from hydra_ext.profile import Amount, ModuleFigures, Profile, balanced_cut, cuts_of

REST = "(outside of the segments)"

_NO_LIMIT = 2**63 - 1  # bytes of the host
_MOST_NESTED = 2  # cuts whose segments also run again in pieces
_AGAIN = (_C.ActivationOption.RECOMPUTE, _C.ActivationOption.RECOMPUTE_OFFLOADED)
_CLOSE = 1.01  # times the least room on the host: near enough for an error


@dataclass(frozen=True, kw_only=True)
class StepSetting:
    """What a plan depends on beside the profile.

    Attributes:
        microbatches: Of a step.
        to_device: Bytes a second from the host to the device.
        to_host: Bytes a second back.
        buffer_bytes: Of the model's buffers, which stay on the device.
        update_seconds: Of the optimizer's step, behind the first round of the next one.
        round_sizes: Numbers of microbatches that may run together; empty for those that the planner tries.
        recompute: Whether segments may run again in backward.
        slowness: Seconds of compute for each one of the profile.
    """

    microbatches: int
    to_device: float
    to_host: float
    buffer_bytes: int
    update_seconds: float = 0.0
    round_sizes: tuple[int, ...] = ()
    recompute: bool = True
    slowness: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a user wants to become of activations.

    Attributes:
        given: Policies of modules.
        coding_of: Gives the coding of segments that may be compressed.
    """

    given: GivenPolicies = field(default_factory=GivenPolicies)
    coding_of: CodingOf = lambda names, nbytes: None


@dataclass(frozen=True, kw_only=True)
class Homes:
    """Where a model lives.

    Attributes:
        nbytes: Of weights, gradients and optimizer state.
        host_budget: Bytes that the host may hold, activations included; None for no limit. The rest is on the disk.
        disk: Bytes a second, each way, of activations that the host cannot hold; 0 if all have to fit.
        on_device: Bytes of gradients and state that have their home on the device, with their weights, if it has room.
        left_free: Bytes of the device that these leave free.
    """

    nbytes: int
    host_budget: int | None = None
    disk: float = 0.0
    on_device: int = 0
    left_free: int = 0

    @property
    def room(self) -> int:
        """Host bytes that weights, gradients and optimizer state leave for activations."""
        return _NO_LIMIT if self.host_budget is None else max(0, self.host_budget - self.nbytes)


class StepProblem:
    """The planner's problem: a model's cuts as chains of segments.

    Attributes:
        homes: As given, or the profile's weights and gradients on the host.
        segments: Of each cut. The last one is what runs outside of the others. Some cuts are there twice: as they are,
            and with segments that run again in pieces.
        names: Of the segments.
        least_bytes: The smallest budget that any plan fits.
        ideal_bytes: The budget with which all activations of a step stay, and all weights.
    """

    def __init__(
        self, profile: Profile, setting: StepSetting, homes: Homes | None = None, wishes: Wishes | None = None
    ) -> None:
        wishes = wishes or Wishes()
        self.profile = profile
        self.setting = setting
        self.homes = homes or Homes(nbytes=sum(block.weight_bytes + block.gradient_bytes for block in profile.blocks))
        cuts = cuts_of(profile, groups=setting.recompute, given=wishes.given)
        self.segments = [self._segments(names, wishes) for names in cuts]
        self._first_nested = len(cuts)
        if setting.recompute:
            self.segments += self._nested(cuts, wishes)
        self.names = [tuple(segment.name for segment in cut) for cut in self.segments]
        self._cuts = [[segment.core() for segment in cut] for cut in self.segments]
        least = _C.least_activation_budget(self._cuts, round_sizes=setting.round_sizes)
        least = max(least, profile.least_bytes())
        self.least_bytes = least + setting.buffer_bytes
        self.ideal_bytes = max(self.least_bytes, self._ideal())

    def _segments(self, names: Sequence[str], wishes: Wishes) -> list[Segment]:
        profile, setting = self.profile, self.setting
        segments = segments_of(
            profile,
            names,
            recompute=setting.recompute,
            slowness=setting.slowness,
            given=wishes.given,
            coding_of=wishes.coding_of,
        )
        return [*segments, _rest(profile, names, setting.slowness)]

    def _nested(self, cuts: Sequence[tuple[str, ...]], wishes: Wishes) -> list[list[Segment]]:
        """The cuts that are the best ones where segments run again in pieces, with such segments."""
        balanced = balanced_cut(self.profile, lambda figures: needs_again(self.profile, figures), given=wishes.given)
        tried = dict.fromkeys([balanced, *cuts])
        found = (in_pieces(self.profile, self._segments(names, wishes), self.setting.slowness) for names in tried)
        return [*islice((segments for segments in found if segments is not None), _MOST_NESTED)]

    def _ideal(self) -> int:
        """The budget with which all is kept, and all weights stay."""
        weights = sum(block.weight_bytes for block in self.profile.blocks)
        peaks = []
        for cut, segments in zip(self._cuts, self.segments, strict=True):
            *_, peak = _C.simulate_activations(
                cut,
                options=[(segment.freedom.options or (_C.ActivationOption.KEEP,))[0] for segment in segments],
                round_size=max(self.setting.round_sizes, default=self.setting.microbatches),
                stash_bytes=0,
                microbatches=self.setting.microbatches,
                budget=1 << 49,
            )
            peaks.append(peak)
        return min(peaks) + weights + self.setting.buffer_bytes

    def solve(
        self, budget: int, *, faster: float = 1.0, microbatches: int | None = None, effort: float = 1.0
    ) -> _C.ActivationPlan:
        """The best plan under a budget; ``faster``: how many times as fast the link is as in the setting.

        Activations get what weights, gradients and optimizer state leave of the host. Beyond it they go at the speed of
        the disk. If that is unknown, weights, gradients and state make room by going to the disk.
        """

        def within(room: int) -> _C.ActivationPlan:
            return self._solve(budget, room, faster=faster, microbatches=microbatches, effort=effort)

        limit = self.homes.host_budget
        if limit is None:
            return within(_NO_LIMIT)
        try:
            return within(self.homes.room)
        except PlanError:
            return within(limit)

    def _solve(
        self, budget: int, room: int, *, faster: float = 1.0, microbatches: int | None = None, effort: float = 1.0
    ) -> _C.ActivationPlan:
        """With so many bytes of activations on the host."""
        try:
            found = self._best(self._cuts[: self._first_nested], budget, room, faster, microbatches, effort)
        except PlanError:
            if self._first_nested == len(self._cuts):
                raise
            return self._best(self._cuts, budget, room, faster, microbatches, effort)
        if self._first_nested == len(self._cuts) or not any(option in _AGAIN for option in found.options):
            return found
        other = self._best(self._cuts, budget, room, faster, microbatches, effort)
        return min(found, other, key=lambda plan: plan.seconds)

    def _best(
        self,
        cuts: Sequence[Sequence[_C.ActivationSegment]],
        budget: int,
        room: int,
        faster: float,
        microbatches: int | None,
        effort: float,
    ) -> _C.ActivationPlan:
        setting = self.setting
        return _C.plan_activations(
            cuts,
            microbatches=microbatches or setting.microbatches,
            budget=budget - setting.buffer_bytes,
            to_device=setting.to_device * faster,
            to_host=setting.to_host * faster,
            host_bytes=room,
            update_seconds=setting.update_seconds,
            round_sizes=setting.round_sizes,
            effort=effort,
            disk=self.homes.disk,
        )

    def judge(self, found: _C.ActivationPlan, budget: int) -> _C.ActivationPlan:
        """The same treatment with this problem's seconds. It may take more than the budget."""
        setting = self.setting
        return _C.judge_activations(
            self._cuts,
            found,
            microbatches=setting.microbatches,
            budget=max(budget - setting.buffer_bytes, found.peak_bytes),
            to_device=setting.to_device,
            to_host=setting.to_host,
            host_bytes=self.homes.room,
            update_seconds=setting.update_seconds,
            disk=self.homes.disk or math.inf,  # of unknown speed: planned as if it took no time
        )

    def kept_bytes(self, found: _C.ActivationPlan) -> int:
        """Bytes of one microbatch that a plan leaves on the device; at most what the whole model saves."""
        profile, whole = self.profile, self.profile.modules[""].saved.fresh
        kept, inside = 0, 0
        for name, option in zip(self.names[found.cut], found.options, strict=True):
            saved, inputs = Amount(fresh=whole - inside, all=whole - inside), Amount()
            if name != REST:
                figures = profile.segment(name)
                saved, inputs = figures.saved, figures.inputs
            inside += saved.fresh
            kept += saved.all if option == _C.ActivationOption.KEEP else 0
            kept += inputs.all if option == _C.ActivationOption.RECOMPUTE else 0
        return min(kept, whole)

    def too_small(self, budget: int) -> BudgetTooSmall:
        neediest = self.profile.neediest()
        moment = f"{neediest.way} of {neediest.module or 'the model'}"
        terms = {
            "activations": neediest.activations,
            "weights": neediest.weights,
            "gradients": neediest.gradients,
            "buffers": self.setting.buffer_bytes,
        }
        beside = "between segments" if 1 in (self.setting.round_sizes or (1,)) else "the round's other microbatches"
        terms[beside] = self.least_bytes - sum(terms.values())
        terms = {what: size for what, size in terms.items() if size}
        listed = ", ".join(f"{what} {_C.human_bytes(size)}" for what, size in terms.items())
        return BudgetTooSmall(
            f"budget={budget} is less than a step of this model takes: the {moment} needs "
            f"{_C.human_bytes(self.least_bytes)} ({listed}); give at least {self.least_bytes} bytes, or a smaller "
            f"microbatch. With {self.ideal_bytes} bytes all activations and weights stay",
            block=neediest.module,
            block_bytes=neediest.weights,
            needed=self.least_bytes,
            moment=moment,
            terms=terms,
            ideal=self.ideal_bytes,
        )

    def host_too_small(self, budget: int) -> HostBudgetTooSmall:
        """The error for a budget that has plans, none of which the host can hold. Raises PlanError if it has none."""
        found = self._solve(budget, _NO_LIMIT)
        least, enough = self.homes.host_budget or 0, moved_bytes(self.segments[found.cut], found)
        while enough > least + 1 and enough > _CLOSE * least:
            middle = (least + enough) // 2
            try:
                self._solve(budget, middle)
                enough = middle
            except PlanError:
                least = middle
        return HostBudgetTooSmall(
            f"host_budget={self.homes.host_budget} cannot hold the activations that leave the device: with "
            f"budget={budget} they take {_C.human_bytes(enough)} in the plan with the fewest that was found. Give a "
            f"host_budget of {enough} bytes, or more budget: with {self.ideal_bytes} bytes no activation leaves",
            needed=enough,
        )


def _rest(profile: Profile, names: Sequence[str], slowness: float) -> Segment:
    """What runs outside of the segments, such as the loss, as one more segment behind them."""
    whole = profile.modules[""]
    inside = [profile.segment(name) for name in names]
    outside = [*profile.outside(names)]
    forward_seconds = slowness * max(0.0, whole.forward_seconds - sum(figures.forward_seconds for figures in inside))
    saved = max(0, whole.saved.fresh - sum(figures.saved.fresh for figures in inside))
    used = {block for name in names for block in profile.blocks_of(name)}
    blocks = [block for number, block in enumerate(profile.blocks) if number not in used]
    slot_bytes = max((block.weight_bytes for block in blocks), default=0)
    gradient_bytes = sum(block.gradient_bytes for block in blocks)
    backward_bytes = max((figures.own.backward_bytes for figures in outside), default=0)
    live_gradient_bytes = min(gradient_bytes, slot_bytes)
    if whole.own.live_gradient_bytes is not None:
        with_gradients = [figures.own.backward_bytes + (figures.own.live_gradient_bytes or 0) for figures in outside]
        live_gradient_bytes = max(with_gradients, default=0) - backward_bytes
    return Segment(
        figures=ModuleFigures(
            name=REST,
            forward_seconds=forward_seconds,
            saved=Amount(fresh=saved, all=saved),
            forward_bytes=max((figures.own.forward_bytes for figures in outside), default=0),
            backward_bytes=backward_bytes,
        ),
        backward_seconds=forward_seconds * profile.backward_ratio,
        weight_bytes=sum(block.weight_bytes for block in blocks),
        slot_bytes=slot_bytes,
        live_gradient_bytes=live_gradient_bytes,
        gradient_bytes=gradient_bytes,
    )
