"""Whether a model's training step fits a device, and how fast it is, before anything runs.

A dry run on fake tensors gives one microbatch's figures. The planner of activations then says what a step should keep,
move and compute again under a budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from hydra_ext import _C
from hydra_ext.errors import BudgetTooSmall, InvalidArgument
from hydra_ext.plan.forecast import Advice, Plan, PlannedSegment
from hydra_ext.plan.segments import segments_of
from hydra_ext.policy import parse_bytes
from hydra_ext.profile import Profile, cuts_of
from hydra_ext.profile.cards import Card, card_named
from hydra_ext.profile.dry_run import dry_run

Example = TypeVar("Example")

_USABLE = 0.92  # of a card's memory: the rest is the driver's, and lost between allocations
_POINTS = 8  # of the curve
_EFFORT_OF_POINT = 0.1
_MORE_BUDGET = 1.25  # as advice
_GAIN = 0.97  # of the seconds: advice that gains less is none
_MOST_MICROBATCHES = 1023  # that the planner takes
_REST = "(outside of the segments)"


def fit(
    model: nn.Module,
    example: Example,
    fn: Callable[[Example], Any],
    *,
    microbatches: int = 4,
    budget: int | str | None = None,
    device: Card | str | None = None,
    link: float | str | None = None,
    param_dtype: torch.dtype | None = None,
    update_seconds: float = 0.0,
) -> Plan:
    """Plans a training step from a dry run: no step is made, and no memory is taken.

    Seconds are from operations, bytes and the speeds of the device. A card's published speeds are peaks, so a real step
    takes longer; plans compare with each other.

    Args:
        model: Any module, also one on meta.
        example: One microbatch. The numbers in it are not read.
        fn: As in ``run.step``: returns the loss of ``example``, alone or with metrics.
        microbatches: Of a step.
        budget: Device bytes. None takes the card's memory, or without a card as much as all activations take.
        device: The name of a known card, such as ``"rtx4090-24"``, or a card's figures; None for this machine.
        link: Bytes a second between host and device, each way; None for the card's, or without a card for no limit.
        param_dtype: Dtype in which weights compute; by default the model's own.
        update_seconds: Of the optimizer's step, which runs behind the next forward.

    Raises:
        BudgetTooSmall: No plan fits. The error names the budget that would do, and the moment that needs it.
        NotOnFakeTensors: ``fn`` needs numbers.
        InvalidArgument: The card is unknown, or a number is not positive.
    """
    card = card_named(device) if isinstance(device, str) else device
    setting = _Setting(
        microbatches=_checked_count(microbatches),
        link=_link_of(link, card),
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        update_seconds=update_seconds,
    )
    asked = None if budget is None else parse_bytes(budget)
    dtype = param_dtype or next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    profile = dry_run(model, example, fn, param_dtype=param_dtype, speed=None if card is None else card.speed(dtype))
    problem = _Problem(profile, setting)
    if asked is None:
        asked = problem.ideal_bytes if card is None else int(card.memory_bytes * _USABLE)
    if asked < problem.least_bytes:
        raise problem.too_small(asked)
    return _plan(problem, asked)


def _checked_count(microbatches: int) -> int:
    if microbatches < 1:
        raise InvalidArgument(f"microbatches={microbatches}: a step has at least one")
    return microbatches


def _link_of(link: float | str | None, card: Card | None) -> float:
    if link is None:
        return math.inf if card is None else card.link_bytes_per_second
    speed = float(parse_bytes(link, named="link")) if isinstance(link, str) else float(link)
    if not speed > 0:
        raise InvalidArgument(f"link={link!r}: nothing could move; give bytes a second, such as '25GB'")
    return speed


@dataclass(frozen=True, kw_only=True)
class _Setting:
    microbatches: int
    link: float
    buffer_bytes: int
    update_seconds: float


class _Problem:
    """The planner's problem: a model's cuts as chains of segments."""

    def __init__(self, profile: Profile, setting: _Setting) -> None:
        self.profile = profile
        self.setting = setting
        self.names = [(*names, _REST) for names in cuts_of(profile)]
        self.cuts = [[*segments_of(profile, names), _rest(profile, names)] for names in cuts_of(profile)]
        least = max(_C.least_activation_budget(self.cuts), profile.least_bytes())
        self.least_bytes = least + setting.buffer_bytes
        self.ideal_bytes = max(self.least_bytes, self._ideal())

    def _ideal(self) -> int:
        """The budget with which all is kept, and all weights stay."""
        weights = sum(block.weight_bytes for block in self.profile.blocks)
        peaks = []
        for cut in self.cuts:
            *_, peak = _C.simulate_activations(
                cut,
                options=[_C.ActivationOption.KEEP] * len(cut),
                round_size=self.setting.microbatches,
                stash_bytes=0,
                microbatches=self.setting.microbatches,
                budget=1 << 49,
            )
            peaks.append(peak)
        return min(peaks) + weights + self.setting.buffer_bytes

    def solve(
        self, budget: int, *, link: float | None = None, microbatches: int | None = None, effort: float = 1.0
    ) -> _C.ActivationPlan:
        link = self.setting.link if link is None else link
        return _C.plan_activations(
            self.cuts,
            microbatches=microbatches or self.setting.microbatches,
            budget=budget - self.setting.buffer_bytes,
            to_device=link,
            to_host=link,
            update_seconds=self.setting.update_seconds,
            effort=effort,
        )

    def too_small(self, budget: int) -> BudgetTooSmall:
        moment, name, terms = self._neediest()
        terms["buffers"] = self.setting.buffer_bytes
        terms["between segments"] = self.least_bytes - sum(terms.values())
        terms = {what: size for what, size in terms.items() if size}
        listed = ", ".join(f"{what} {_C.human_bytes(size)}" for what, size in terms.items())
        return BudgetTooSmall(
            f"budget={budget} is less than a step of this model takes: the {moment} needs "
            f"{_C.human_bytes(self.least_bytes)} ({listed}); give at least {self.least_bytes} bytes, or a smaller "
            f"microbatch. With {self.ideal_bytes} bytes all activations stay",
            block=name,
            block_bytes=terms.get("weights", 0),
            needed=self.least_bytes,
            moment=moment,
            terms=terms,
            ideal=self.ideal_bytes,
        )

    def _neediest(self) -> tuple[str, str, dict[str, int]]:
        whole = self.profile.modules[""]
        found = [
            (whole.forward_bytes, "forward", "", {"activations": whole.forward_bytes, "weights": 0, "gradients": 0}),
            (whole.backward_bytes, "backward", "", {"activations": whole.backward_bytes, "weights": 0, "gradients": 0}),
        ]
        for name, numbers in self.profile.sites.items():
            figures, used = self.profile.modules[name], [self.profile.blocks[number] for number in numbers]
            weights = sum(block.weight_bytes for block in used)
            gradients = sum(block.gradient_bytes for block in used)
            for way, activations, more in (
                ("forward", figures.forward_bytes, 0),
                ("backward", figures.backward_bytes, gradients),
            ):
                terms = {"activations": activations, "weights": weights, "gradients": more}
                found.append((sum(terms.values()), way, name, terms))
        _, way, name, terms = max(found, key=lambda each: each[0])
        return f"{way} of {name or 'the model'}", name, terms


def _rest(profile: Profile, names: Sequence[str]) -> _C.ActivationSegment:
    """What runs outside of the segments, such as the loss, as one more segment behind them."""
    whole = profile.modules[""]
    inside = [profile.modules[name] for name in names]
    outside = [figures for figures in profile.modules.values() if not _is_within(figures.name, names)]
    forward_seconds = max(0.0, whole.forward_seconds - sum(figures.forward_seconds for figures in inside))
    saved = max(0, whole.saved.fresh - sum(figures.saved.fresh for figures in inside))
    used = {block for name in names for block in profile.blocks_of(name)}
    blocks = [block for number, block in enumerate(profile.blocks) if number not in used]
    weights = [block.weight_bytes for block in blocks]
    return _C.ActivationSegment(
        forward_seconds=forward_seconds,
        backward_seconds=forward_seconds * profile.backward_ratio,
        saved_fresh=saved,
        saved_all=saved,
        inputs_fresh=0,
        inputs_all=0,
        parked_bytes=0,
        forward_bytes=max((figures.own_forward_bytes for figures in outside), default=0),
        backward_bytes=max((figures.own_backward_bytes for figures in outside), default=0),
        weight_bytes=sum(weights),
        slot_bytes=max(weights, default=0),
        gradient_bytes=sum(block.gradient_bytes for block in blocks),
    )


def _is_within(name: str, segments: Sequence[str]) -> bool:
    return any(not segment or name == segment or name.startswith(f"{segment}.") for segment in segments)


# ---- the answer -----------------------------------------------------------------------------------------------------
def _plan(problem: _Problem, budget: int) -> Plan:
    setting = problem.setting
    found = problem.solve(budget)
    weights = sum(block.weight_bytes for block in problem.profile.blocks)
    gradients = sum(block.gradient_bytes for block in problem.profile.blocks)
    segments = _segments(problem, found)
    return Plan(
        budget=budget,
        least_bytes=problem.least_bytes,
        ideal_bytes=problem.ideal_bytes,
        peak_bytes=found.peak_bytes + setting.buffer_bytes,
        host_bytes=weights + gradients + found.round_size * sum(segment.moved_bytes for segment in segments),
        microbatches=setting.microbatches,
        round_size=found.round_size,
        stash_bytes=found.stash_bytes,
        seconds=found.seconds,
        lanes={
            "compute": found.compute_seconds,
            "to device": found.to_device_seconds,
            "to host": found.to_host_seconds,
        },
        segments=segments,
        curve=_curve(problem, budget, found.seconds),
        advice=_advice(problem, budget, found.seconds),
    )


def _segments(problem: _Problem, found: _C.ActivationPlan) -> tuple[PlannedSegment, ...]:
    profile, setting = problem.profile, problem.setting
    planned = []
    for name, option in zip(problem.names[found.cut], found.options, strict=True):
        if name == _REST:
            continue
        figures = profile.modules[name]
        again = option in (_C.ActivationOption.RECOMPUTE, _C.ActivationOption.RECOMPUTE_OFFLOADED)
        forward, backward = figures.forward_seconds, figures.forward_seconds * profile.backward_ratio
        moved = {
            _C.ActivationOption.OFFLOAD: figures.saved.fresh,
            _C.ActivationOption.RECOMPUTE_OFFLOADED: figures.inputs.fresh,
        }.get(option, 0)
        kept = {
            _C.ActivationOption.KEEP: figures.saved.all,
            _C.ActivationOption.RECOMPUTE: figures.inputs.all,
        }.get(option, 0)
        planned.append(
            PlannedSegment(
                name=name or "(the model)",
                choice=option.name.lower().replace("_", ", inputs "),
                saved_bytes=figures.saved.fresh,
                kept_bytes=kept,
                moved_bytes=moved,
                seconds=setting.microbatches * (forward + backward + (forward if again else 0.0)),
                why=_why(figures.saved.fresh, moved, forward, setting.link, again=again),
            )
        )
    return tuple(planned)


def _why(saved: int, moved: int, forward: float, link: float, *, again: bool) -> str:
    moving = 2 * (saved if again or not moved else moved) / link
    if again:
        return f"{_milliseconds(forward)} to compute again, {_milliseconds(moving)} to move"
    if moved:
        return f"{_milliseconds(moving)} to move, both ways"
    return "there is room" if saved else "saves nothing"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _curve(problem: _Problem, budget: int, seconds: float) -> tuple[tuple[int, float], ...]:
    """Seconds at budgets from the least to the ideal one. What fits a budget also fits a larger one."""
    least, ideal = problem.least_bytes, problem.ideal_bytes
    budgets = [round(least * (ideal / least) ** (point / (_POINTS - 1))) for point in range(_POINTS)]
    found = {each: problem.solve(max(each, least), effort=_EFFORT_OF_POINT).seconds for each in sorted({*budgets})}
    found[budget] = seconds
    best, curve = math.inf, []
    for each in sorted(found):
        best = min(best, found[each])
        curve.append((each, best))
    return tuple(curve)


def _advice(problem: _Problem, budget: int, seconds: float) -> tuple[Advice, ...]:
    """What would make steps faster, the best first. Seconds are of as many microbatches as the step has."""
    more = problem.solve(int(budget * _MORE_BUDGET)).seconds
    tries = {f"{_MORE_BUDGET:g} times the budget": more}
    if problem.setting.link < math.inf:
        tries["twice the link's speed"] = problem.solve(budget, link=2 * problem.setting.link).seconds
    if 2 * problem.setting.microbatches <= _MOST_MICROBATCHES:
        twice = problem.solve(budget, microbatches=2 * problem.setting.microbatches).seconds
        tries["twice the microbatches in a step"] = twice / 2
    good = [Advice(change=change, seconds=each) for change, each in tries.items() if each < _GAIN * seconds]
    return tuple(sorted(good, key=lambda advice: advice.seconds))
