"""Whether a model's training step fits a device, and how fast it is, before anything runs.

A dry run on fake tensors gives one microbatch's figures. The planner of activations then says what a step should keep,
move and compute again under a budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from hydra_ext import _C
from hydra_ext.errors import InvalidArgument
from hydra_ext.plan.steps.forecast import Advice, Plan, PlannedSegment
from hydra_ext.plan.steps.problem import REST, StepProblem, StepSetting
from hydra_ext.policy import parse_bytes
from hydra_ext.profile.cards import USABLE, Card, card_named, link_of
from hydra_ext.profile.dry_run import dry_run

Example = TypeVar("Example")

_POINTS = 8  # of the curve
_EFFORT_OF_POINT = 0.1
_MORE_BUDGET = 1.25  # as advice
_GAIN = 0.97  # of the seconds: advice that gains less is none
_MOST_MICROBATCHES = 1023  # that the planner takes


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
    speed = link_of(link, card)
    setting = StepSetting(
        microbatches=_checked_count(microbatches),
        to_device=speed,
        to_host=speed,
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        update_seconds=update_seconds,
    )
    asked = None if budget is None else parse_bytes(budget)
    dtype = param_dtype or next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    profile = dry_run(model, example, fn, param_dtype=param_dtype, speed=None if card is None else card.speed(dtype))
    problem = StepProblem(profile, setting)
    if asked is None:
        asked = problem.ideal_bytes if card is None else int(card.memory_bytes * USABLE)
    if asked < problem.least_bytes:
        raise problem.too_small(asked)
    return _plan(problem, asked)


def _checked_count(microbatches: int) -> int:
    if microbatches < 1:
        raise InvalidArgument(f"microbatches={microbatches}: a step has at least one")
    return microbatches


# ---- the answer -----------------------------------------------------------------------------------------------------
def _plan(problem: StepProblem, budget: int) -> Plan:
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


def _segments(problem: StepProblem, found: _C.ActivationPlan) -> tuple[PlannedSegment, ...]:
    profile, setting = problem.profile, problem.setting
    planned = []
    for name, option in zip(problem.names[found.cut], found.options, strict=True):
        if name == REST:
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
                why=_why(figures.saved.fresh, moved, forward, setting.to_device, again=again),
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


def _curve(problem: StepProblem, budget: int, seconds: float) -> tuple[tuple[int, float], ...]:
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


def _advice(problem: StepProblem, budget: int, seconds: float) -> tuple[Advice, ...]:
    """What would make steps faster, the best first. Seconds are of as many microbatches as the step has."""
    more = problem.solve(int(budget * _MORE_BUDGET)).seconds
    tries = {f"{_MORE_BUDGET:g} times the budget": more}
    if problem.setting.to_device < math.inf:
        tries["twice the link's speed"] = problem.solve(budget, faster=2.0).seconds
    if 2 * problem.setting.microbatches <= _MOST_MICROBATCHES:
        twice = problem.solve(budget, microbatches=2 * problem.setting.microbatches).seconds
        tries["twice the microbatches in a step"] = twice / 2
    good = [Advice(change=change, seconds=each) for change, each in tries.items() if each < _GAIN * seconds]
    return tuple(sorted(good, key=lambda advice: advice.seconds))
