"""Pipelines of profiled graphs, against exhaustive search and a judge that shares no code with the planner."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import pytest

from hydra_ext.errors import PlanError
from hydra_ext.plan import pipedream
from support.plan.pipelines import Judge, random_problem, random_profile

SAME = 1e-9  # relative


def check(problem: dict[str, Any], best: float) -> None:
    found = pipedream.solve(problem)
    if math.isinf(best):
        assert found.objective is None
        assert found.plan is None
        return
    assert found.plan is not None
    assert found.objective == pytest.approx(best, rel=SAME)
    assert Judge(problem).objective(found.plan) == pytest.approx(best, rel=SAME)
    assert found.gap == 0


@pytest.mark.parametrize("seed", range(150))
def test_one_level_is_optimal(seed: int) -> None:
    chance = random.Random(seed)
    problem = random_problem(chance, nodes=chance.randint(1, 6), density=chance.choice([0.2, 0.5, 0.9]))
    check(problem, Judge(problem).best())


@pytest.mark.parametrize("seed", range(60))
def test_two_levels_are_optimal(seed: int) -> None:
    chance = random.Random(seed)
    problem = random_problem(chance, nodes=chance.randint(1, 5), levels=2, density=chance.choice([0.3, 0.7]))
    check(problem, Judge(problem).best())


def wide_problem(machines: list[int]) -> dict[str, Any]:
    """Eight branches of four layers, with 5^8 closed sets: too many to list."""
    chance = random.Random(7)
    profile: dict[str, Any] = {"nodes": [], "edges": []}
    for branch in range(8):
        for i in range(4):
            node = random_profile(chance, nodes=1, density=0)["nodes"][1]
            profile["nodes"].append({**node, "id": f"{branch}.{i}", "forward_ms": chance.uniform(0.5, 3)})
            if i > 0:
                profile["edges"].append([f"{branch}.{i - 1}", f"{branch}.{i}"])
    return {
        "profile": profile,
        "machines": machines,
        "bandwidth_bytes_per_s": [1e6] * len(machines),
        "memory_cap_bytes": None,
        "straight": False,
        "hierarchical": len(machines) == 2,
        "use_fewer_machines": False,
        "activation_transfers_in_objective": True,
    }


@pytest.mark.full
@pytest.mark.parametrize("machines", [[2], [2, 2]])
def test_a_wide_graph_has_a_plan_and_a_bound(machines: list[int]) -> None:
    problem = wide_problem(machines)
    found = pipedream.solve(problem)
    assert found.plan is not None
    assert found.objective is not None
    assert found.bound is not None
    assert Judge(problem).objective(found.plan) == pytest.approx(found.objective, rel=SAME)
    compute = sum(node["forward_ms"] + node["backward_ms"] for node in problem["profile"]["nodes"])
    assert compute / math.prod(machines) <= found.bound * (1 + SAME)
    assert found.bound <= found.objective
    if len(machines) == 2:  # the faster one
        assert pipedream.solve(problem) == found


def test_outputs_without_users_are_dropped() -> None:
    problem = random_problem(random.Random(3), nodes=4)
    problem["profile"]["nodes"].append(
        {
            "id": 77,
            "desc": "__getitem__(1)",
            "forward_ms": 0,
            "backward_ms": 0,
            "activation_bytes": 5000,
            "parameter_bytes": 0,
        }
    )
    problem["profile"]["edges"].append(["n1", 77])
    problem["memory_cap_bytes"] = None
    found = pipedream.solve(problem)
    assert found.plan is not None
    assert 77 not in [node for stage in found.plan for node in stage[1]]  # type: ignore[index]
    check(problem, Judge(problem).best())


def with_entry(path: list[Any], value: object) -> dict[str, Any]:
    problem = copy.deepcopy(wide_problem([2]))
    place: Any = problem
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return problem


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["machines"], [0], "machines.*whole number"),
        (["machines"], [2000], "at most 1023"),
        (["machines"], [2, 2], "'hierarchical' is False"),
        (["machines"], 2, "give a list"),
        (["bandwidth_bytes_per_s"], [0], "above 0"),
        (["bandwidth_bytes_per_s"], [math.inf], "finite"),
        (["bandwidth_bytes_per_s"], [], "give 1"),
        (["hierarchical"], 1, "true or false"),
        (["straight"], None, "true or false"),
        (["memory_cap_bytes"], -1, "at least 0"),
        (["profile"], [], "mapping"),
        (["profile", "nodes"], [], "at least one layer"),
        (["profile", "nodes", 0], 3, "mapping"),
        (["profile", "nodes", 0, "forward_ms"], -1, r"nodes\[0\]\['forward_ms'\] is -1"),
        (["profile", "nodes", 0, "backward_ms"], math.nan, "finite"),
        (["profile", "nodes", 0, "activation_bytes"], "4", "give a number"),
        (["profile", "nodes", 0, "parameter_bytes"], 1e300, "smaller"),
        (["profile", "nodes", 0, "desc"], 4, "text"),
        (["profile", "nodes", 0, "id"], [], "whole number or a text"),
        (["profile", "nodes", 0, "id"], "1.1", "each id once"),
        (["profile", "edges", 0], ["0.0"], "ids of two nodes"),
        (["profile", "edges", 0], ["0.0", "x"], "no id of a node"),
        (["profile", "edges", 0], ["0.3", "0.1"], "cycle"),
        (["profile", "edges", 0], ["0.1", "0.1"], "cycle"),
    ],
)
def test_a_bad_problem_is_refused(path: list[Any], value: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        pipedream.solve(with_entry(path, value))


@pytest.mark.every_case
@pytest.mark.parametrize("key", list(wide_problem([2])))
def test_every_entry_is_needed(key: str) -> None:
    problem = wide_problem([2])
    del problem[key]
    with pytest.raises(PlanError, match=f"has no '{key}'"):
        pipedream.solve(problem)
