"""Describes a planned step: segments, lanes, the curve over budgets, and what would help."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hydra_ext import _C
from hydra_ext.errors import PlanError
from hydra_ext.plan.steps.forecast import Advice, MeasuredStep, Plan, PlannedSegment
from hydra_ext.plan.steps.memory import moved_bytes, moved_of
from hydra_ext.plan.steps.problem import REST, StepProblem
from hydra_ext.plan.steps.timeline import TreatedStep

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
    measured: MeasuredStep | None = None,
    measured_because: str | None = None,
    least_bytes: int | None = None,
    heads_in_rows: Sequence[str] = (),
) -> Plan:
    """Describes what the planner has found; by default the best plan for the budget.

    Args:
        least_bytes: The smallest budget, where the problem is not the one with the smallest.
        heads_in_rows: Names of heads that run in rows.
    """
    setting = problem.setting
    found = problem.solve(budget) if found is None else found
    chain = problem.segments[found.cut]
    held = problem.homes.nbytes + moved_bytes(chain, found)
    host = held if problem.homes.host_budget is None else min(held, problem.homes.host_budget)
    return Plan(
        least_bytes=problem.least_bytes if least_bytes is None else least_bytes,
        ideal_bytes=problem.ideal_bytes,
        peak_bytes=found.peak_bytes + setting.buffer_bytes,
        host_bytes=host,
        disk_bytes=held - host,
        seconds=found.seconds,
        lanes={
            "compute": found.compute_seconds,
            "to device": found.to_device_seconds,
            "to host": found.to_host_seconds,
            "optimizer": setting.update_seconds,
        },
        segments=_segments(problem, found),
        curve=_curve(problem, budget, found.seconds),
        advice=_advice(problem, budget, found.seconds),
        measured=measured,
        measured_because=measured_because,
        _step=TreatedStep.of(problem, budget, found, heads_in_rows=heads_in_rows),
    )


def _segments(problem: StepProblem, found: _C.ActivationPlan) -> tuple[PlannedSegment, ...]:
    profile, setting = problem.profile, problem.setting
    planned = []
    for segment, option in zip(problem.segments[found.cut], found.options, strict=True):
        name = segment.name
        if name == REST:
            continue
        figures, coding = profile.segment(name), segment.freedom.coding
        again = option in (_C.ActivationOption.RECOMPUTE, _C.ActivationOption.RECOMPUTE_OFFLOADED)
        forward, backward = figures.forward_seconds, figures.forward_seconds * profile.backward_ratio
        moved = moved_of(segment, option)
        coded = coding.seconds if coding is not None and option == _C.ActivationOption.COMPRESS else 0.0
        nested = segment.freedom.nested if again else None
        second = segment.again_seconds / setting.slowness
        choice = option.name.lower().replace("_", ", inputs ")
        why = _why(figures.saved.fresh, moved, second, setting.to_device, again=again)
        kept = {
            _C.ActivationOption.KEEP: figures.saved.all,
            _C.ActivationOption.RECOMPUTE: figures.inputs.all,
        }.get(option, 0)
        planned.append(
            PlannedSegment(
                name=name or "(the model)",
                choice=choice if nested is None else choice.replace("recompute", "recompute in pieces"),
                saved_bytes=figures.saved.fresh,
                kept_bytes=kept,
                moved_bytes=moved,
                seconds=setting.microbatches * (forward + backward + (second if again else 0.0) + coded),
                why=why if segment.freedom.options is None else f"given; {why}",
            )
        )
    return tuple(planned)


def _why(saved: int, moved: int, second: float, link: float, *, again: bool) -> str:
    moving = 2 * (saved if again or not moved else moved) / link
    if again:
        return f"{_milliseconds(second)} to compute again, {_milliseconds(moving)} to move"
    if moved:
        return f"{_milliseconds(moving)} to move, both ways"
    return "there is room" if saved else "saves nothing"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _curve(problem: StepProblem, budget: int, seconds: float) -> tuple[tuple[int, float], ...]:
    """Seconds at budgets from the least to the ideal one. What fits a budget also fits a larger one."""
    least, ideal = problem.least_bytes, problem.ideal_bytes
    budgets = [round(least * (ideal / least) ** (point / (_POINTS - 1))) for point in range(_POINTS)]
    found = {each: _seconds(problem, max(each, least), effort=_EFFORT_OF_POINT) for each in sorted({*budgets})}
    found[budget] = seconds
    best, curve = math.inf, []
    for each in sorted(found):
        best = min(best, found[each])
        if best < math.inf:
            curve.append((each, best))
    return tuple(curve)


def _advice(problem: StepProblem, budget: int, seconds: float) -> tuple[Advice, ...]:
    """What would make steps faster, the best first. Seconds are of as many microbatches as the step has."""
    more = _seconds(problem, int(budget * _MORE_BUDGET), effort=_EFFORT_OF_ADVICE)
    tries = {f"{_MORE_BUDGET:g} times the budget": more}
    if problem.setting.to_device < math.inf:
        tries["twice the link's speed"] = _seconds(problem, budget, faster=2.0, effort=_EFFORT_OF_ADVICE)
    if 2 * problem.setting.microbatches <= _MOST_MICROBATCHES:
        twice = _seconds(problem, budget, microbatches=2 * problem.setting.microbatches, effort=_EFFORT_OF_ADVICE)
        tries["twice the microbatches in a step"] = twice / 2
    good = [Advice(change=change, seconds=each) for change, each in tries.items() if each < _GAIN * seconds]
    return tuple(sorted(good, key=lambda advice: advice.seconds))


def _seconds(problem: StepProblem, budget: int, **options: Any) -> float:
    """Infinite where the host holds no plan."""
    try:
        return problem.solve(budget, **options).seconds
    except PlanError:
        return math.inf
