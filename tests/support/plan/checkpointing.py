"""Schedules of a chain's forward and backward: what one takes, and all schedules of a class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Schedule = list[list[Any]]


def judge(problem: Mapping[str, Any], plan: Sequence[Sequence[Any]]) -> tuple[float, int]:
    """The time of a plan, and the least memory that it runs in. A ValueError if an operation lacks what it needs."""
    values, saved = problem["x_size"], [0, *problem["saved_size"]]
    stored: dict[tuple[str, int], int] = {("x", 0): values[0]}
    gradient, time, peak = problem["n"], 0.0, 0
    for operation, i in plan:
        held = sum(stored.values()) + values[gradient]
        if operation == "delete_x":
            if stored.pop(("x", i), None) is None:
                raise ValueError(f"x_{i} is not stored")
            continue
        if not {("x", i - 1), ("s", i - 1)} & stored.keys():
            raise ValueError(f"{operation} {i} has no input")
        if operation == "backward":
            if gradient != i or ("s", i) not in stored:
                raise ValueError(f"backward {i} at gradient {gradient} of {sorted(stored)}")
            peak = max(peak, held + values[i - 1] + problem["backward_transient"][i - 1])
            del stored["s", i]
            gradient = i - 1
            time += problem["backward_time"][i - 1]
            continue
        key = {"forward": ("x", i), "forward_saving": ("s", i)}[operation]
        if key in stored:
            raise ValueError(f"{operation} {i} is made twice")
        stored[key] = values[i] if operation == "forward" else saved[i]
        peak = max(peak, held + stored[key] + problem["forward_transient"][i - 1])
        time += problem["forward_time"][i - 1]
    if gradient:
        raise ValueError(f"the gradient of x_{gradient} is the last one")
    return time, peak


def persistent(first: int, last: int, own: bool = True) -> Iterator[Schedule]:
    """All persistent schedules of stages first to last; ``own``: their input is an x, and is to be deleted."""
    freed = [["delete_x", first - 1]] if own and first > 1 else []
    if first == last:
        yield [["forward_saving", first], ["backward", first], *freed]
        return
    for rest in persistent(first + 1, last, False):
        yield [["forward_saving", first], *rest, ["backward", first], *freed]
    for kept in range(first, last):
        passed: Schedule = []
        for i in range(first, kept + 1):
            passed += [["forward", i], *([["delete_x", i - 1]] if i > first else [])]
        for later in persistent(kept + 1, last):
            for sooner in persistent(first, kept, own):
                yield [*passed, *later, *sooner]


def flat(first: int, last: int, own: bool = True) -> Iterator[Schedule]:
    """All flat schedules: each segment is kept, or runs again once."""
    if first > last:
        yield []
        return
    freed = [["delete_x", first - 1]] if own and first > 1 else []
    for rest in flat(first + 1, last, False):
        yield [["forward_saving", first], *rest, ["backward", first], *freed]
    for end in range(first, last + 1):
        passed: Schedule = []
        for i in range(first, end + 1):
            passed += [["forward", i], *([["delete_x", i - 1]] if i > first else [])]
        again: Schedule = [["forward_saving", i] for i in range(first, end + 1)]
        again += [["backward", i] for i in range(end, first - 1, -1)]
        dropped: Schedule = [["delete_x", end]] if end == last else []
        for rest in flat(end + 1, last):
            yield [*passed, *dropped, *rest, *again, *freed]
