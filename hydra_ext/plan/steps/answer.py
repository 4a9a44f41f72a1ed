"""Describes a planned step: segments, lanes, the curve over budgets, and what would help."""

from __future__ import annotations

import math

from hydra_ext import _C
from hydra_ext.plan.steps.forecast import Advice, Plan, PlannedSegment
from hydra_ext.plan.steps.problem import REST, StepProblem

_POINTS = 8  # of the curve
_EFFORT_OF_POINT = 0.1
_EFFORT_OF_ADVICE = 0.3
_MORE_BUDGET = 1.25  # as advice
_GAIN = 0.97  # of the seconds: advice that gains less is none
_MOST_MICROBATCHES = 1023  # that the planner takes


def answer(
    problem: StepProblem,
    budget: int,
    found: _C.ActivationPlan | None = None,
    *,
    measured_seconds: float | None = None,
    measured_peak_bytes: int | None = None,
) -> Plan:
    """Describes what the planner has found; by default the best plan for the budget."""
    setting = problem.setting
    found = problem.solve(budget) if found is None else found
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
        measured_seconds=measured_seconds,
        measured_peak_bytes=measured_peak_bytes,
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
    more = problem.solve(int(budget * _MORE_BUDGET), effort=_EFFORT_OF_ADVICE).seconds
    tries = {f"{_MORE_BUDGET:g} times the budget": more}
    if problem.setting.to_device < math.inf:
        tries["twice the link's speed"] = problem.solve(budget, faster=2.0, effort=_EFFORT_OF_ADVICE).seconds
    if 2 * problem.setting.microbatches <= _MOST_MICROBATCHES:
        twice = problem.solve(budget, microbatches=2 * problem.setting.microbatches, effort=_EFFORT_OF_ADVICE).seconds
        tries["twice the microbatches in a step"] = twice / 2
    good = [Advice(change=change, seconds=each) for change, each in tries.items() if each < _GAIN * seconds]
    return tuple(sorted(good, key=lambda advice: advice.seconds))
