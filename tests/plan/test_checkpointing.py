"""Schedules of chains within a memory, against all schedules of their class and an evaluator of its own."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hydra_ext.errors import PlanError
from hydra_ext.plan.checkpointing import solve
from support.plan.checkpointing import flat, judge, persistent

CLASSES = {"persistent": persistent, "flat": flat}


def random_problem(seed: int, stages: int, largest: int) -> dict[str, Any]:
    draw = random.Random(seed)
    outputs = [draw.randint(1, largest) for _ in range(stages + 1)]
    return {
        "n": stages,
        "forward_time": [draw.randint(1, 9) for _ in range(stages)],
        "backward_time": [draw.randint(1, 9) for _ in range(stages)],
        "x_size": outputs,
        "saved_size": [size + draw.randint(0, 3 * largest) for size in outputs[1:]],
        "forward_transient": [draw.choice([0, draw.randint(0, largest)]) for _ in range(stages)],
        "backward_transient": [draw.choice([0, draw.randint(0, largest)]) for _ in range(stages)],
    }


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("largest", [3, 40, 10**12])
def test_random_chains_are_solved_as_exhaustive_search_does(kind: str, largest: int) -> None:
    for seed in range(60):
        problem = random_problem(seed, 1 + seed % 6, largest)
        judged = [judge(problem, plan) for plan in CLASSES[kind](1, problem["n"])]
        peaks = sorted({peak for _, peak in judged})
        for limit in {peaks[0] - 1, *random.Random(seed).sample(peaks, min(4, len(peaks))), peaks[-1] + 1}:
            found = solve({**problem, "memory_limit": limit, "class": kind})
            best = min((time for time, peak in judged if peak <= limit), default=None)
            assert found.objective == best == found.bound, (seed, limit)
            if found.plan is not None:
                time, peak = judge(problem, found.plan)  # type: ignore[arg-type]
                assert time == found.objective
                assert peak <= limit
                assert found.gap == 0


def test_times_need_not_be_whole() -> None:
    problem = random_problem(1, 5, 10**9)
    problem["forward_time"] = [each / 7 for each in problem["forward_time"]]
    judged = [judge(problem, plan) for plan in persistent(1, 5)]
    for _, limit in judged:
        found = solve({**problem, "memory_limit": limit, "class": "persistent"})
        assert found.objective == pytest.approx(min(time for time, peak in judged if peak <= limit), rel=1e-12)


@pytest.mark.parametrize("kind", CLASSES)
def test_long_chains_have_a_plan_and_a_bound(kind: str) -> None:
    problem = random_problem(7, 40, 10**9)
    everything = problem["x_size"][0] + sum(problem["saved_size"])
    least = sum(problem["forward_time"]) + sum(problem["backward_time"])
    for share in (0.3, 0.6, 0.9):
        found = solve({**problem, "memory_limit": int(share * everything), "class": kind})
        assert found.plan is not None
        assert found.objective is not None
        assert found.bound is not None
        time, peak = judge(problem, found.plan)  # type: ignore[arg-type]
        assert time == found.objective
        assert peak <= int(share * everything)
        assert least <= found.bound <= found.objective
        assert found.gap is not None
        assert found.gap < 0.05


GOOD = {**random_problem(0, 3, 9), "memory_limit": 100, "class": "flat"}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"class": "any"}, "'persistent' or 'flat'"),
        ({"class": None}, "'persistent' or 'flat'"),
        ({"n": 4}, "has 4 numbers: give 5"),
        ({"n": 0, "x_size": [1]}, "give 0"),
        ({"n": "3"}, "whole number"),
        ({"n": True}, "whole number"),
        ({"memory_limit": -1}, r"\'memory_limit\'\] is -1"),
        ({"memory_limit": None}, r"\'memory_limit\'\] is None"),
        ({"memory_limit": float("nan")}, "whole number"),
        ({"x_size": [1, 2, 3]}, r"\'x_size\'\] has 3"),
        ({"x_size": "1234"}, r"'x_size'\] is '1234'"),
        ({"x_size": [1, 2, 3, 2**60]}, r"'x_size'\]\[3\]"),
        ({"saved_size": [1, 2, 0.5]}, r"'saved_size'\]\[2\]"),
        ({"saved_size": [2**59, 2**59, 2**59]}, "too many to count"),
        ({"forward_time": [1, 2, -3]}, r"'forward_time'\]\[2\]"),
        ({"forward_time": [1, 2, float("inf")]}, "finite"),
        ({"forward_time": [1, 2, 10**400]}, "a very large number"),
        ({"backward_time": [1, 2, "3"]}, r"'backward_time'\]\[2\]"),
        ({"backward_time": {}}, "give a list"),
    ],
)
def test_senseless_problems_are_refused(change: dict[str, Any], text: str) -> None:
    solve(GOOD)
    with pytest.raises(PlanError, match=text):
        solve({**GOOD, **change})


@pytest.mark.every_case
@pytest.mark.parametrize("name", GOOD)
def test_a_missing_key_is_named(name: str) -> None:
    with pytest.raises(PlanError, match=f"no '{name}'"):
        solve({key: value for key, value in GOOD.items() if key != name})


def test_a_chain_without_stages_is_refused() -> None:
    lists: dict[str, Any] = {key: [] for key, value in GOOD.items() if isinstance(value, list)}
    with pytest.raises(PlanError, match="without stages"):
        solve({**GOOD, **lists, "n": 0, "x_size": [1]})
