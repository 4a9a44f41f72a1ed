"""`solve`: every kind has its planner, and a problem that makes no sense is refused with what to do."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest

from hydra_ext.errors import PlanError
from hydra_ext.plan import Solution, solve
from support.plan import splits

Problem = dict[str, Any]
Path = tuple[Any, ...]

EQUAL_BLOCKS: Problem = {
    "num_blocks": 4,
    "num_workers": 2,
    "memory_capacity": 1e12,
    "computation_time_per_block": 1.0,
    "num_parameters_per_block": 10,
    "num_activations_per_block": 10,
    "output_activation_size": 10,
}
TWO_BUFFERS: Problem = {
    "num_blocks": 4,
    "devices": 2,
    "gpus_per_server": 8,
    "global_batch": 8,
    "microbatch_sizes": [1, 2],
    "block_time_s": [1.0, 1.5],
    "block_activation_bytes": [1.0, 2.0],
    "boundary_activation_bytes": [1.0, 2.0],
    "block_weight_bytes": 10,
    "block_optimizer_bytes": 10,
    "bw_high": 100.0,
    "bw_low": 10.0,
    "device_memory_bytes": 1e12,
}
SPLIT: Problem = {**splits.make_problem(random.Random(2), layers=5, devices=4), "memory_bytes": 1e9}
JOBS: Problem = {
    "nodes": [2, 4],
    "jobs": [
        {"name": "a", "options": [{"gpus": 1, "runtime_s": 7.0}, {"gpus": 4, "runtime_s": 2.5}]},
        {"name": "b", "minibatches": 10.0, "options": [{"gpus": 2, "seconds_per_minibatch": 0.5}]},
    ],
}
UNITS: Problem = {
    "devices": 2,
    "jobs": [
        {"name": "a", "units": [[2.0, 0], [4.0, 1, 5.0]]},
        {"name": "b", "units": [[3.0, 0], [3.0, 0]]},
    ],
}
PROBLEMS = {
    "equal_split": SPLIT,
    "spase": JOBS,
    "twobw": TWO_BUFFERS,
    "unequal_split": SPLIT,
    "units": UNITS,
    "width_depth": EQUAL_BLOCKS,
}
IGNORED = {("unequal_split", "order")}


def places(value: Any, path: Path = ()) -> Iterator[Path]:
    """Every entry of a problem, at any depth."""
    if path:
        yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from places(part, (*path, key))


def replaced(problem: Problem, path: Path, value: Any) -> Problem:
    changed = copy.deepcopy(problem)
    holder: Any = changed
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return changed


def removed(problem: Problem, path: Path) -> Problem:
    changed = copy.deepcopy(problem)
    holder: Any = changed
    for key in path[:-1]:
        holder = holder[key]
    del holder[path[-1]]
    return changed


CASES = [
    (kind, path) for kind, problem in PROBLEMS.items() for path in places(problem) if (kind, path[0]) not in IGNORED
]


@pytest.mark.every_case
@pytest.mark.parametrize("kind", PROBLEMS)
def test_every_kind_solves_its_problem(kind: str) -> None:
    assert solve(kind, PROBLEMS[kind]).gap == 0


@pytest.mark.parametrize(("kind", "path"), CASES)
def test_no_other_type_is_taken_anywhere(kind: str, path: Path) -> None:
    for value in (None, {"a": 1}, True, object()):
        with pytest.raises(PlanError, match=r": (give|add)"):
            solve(kind, replaced(PROBLEMS[kind], path, value))


@pytest.mark.parametrize(("kind", "path"), [case for case in CASES if case[1][-1] != "id"])
def test_no_number_is_negative_or_endless(kind: str, path: Path) -> None:
    for value in (-1, -0.5, math.inf, math.nan, 10**400):
        with pytest.raises(PlanError, match=": give"):
            solve(kind, replaced(PROBLEMS[kind], path, value))


@pytest.mark.parametrize(("kind", "path"), [case for case in CASES if isinstance(case[1][-1], str)])
def test_no_entry_may_be_missing(kind: str, path: Path) -> None:
    with pytest.raises(PlanError, match=f"has no '{path[-1]}': add it"):
        solve(kind, removed(PROBLEMS[kind], path))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("bandwidth_bytes_per_s",), 0, r"\['bandwidth_bytes_per_s'\] is 0: give a number above 0"),
        (("devices",), 2.0, r"\['devices'\] is 2.0: give a whole number"),
        (("devices",), 0, r"\['devices'\] is 0: give a whole number"),
        (("model", "nodes"), [], "'nodes' is empty: give at least one layer"),
        (("model", "nodes"), "abc", "is 'abc': give a list"),
        (("model", "edges", 0), [1, 2], r"edges\[0\] has 2 entries: give two ids"),
        (("model", "edges", 0, 0), 7, r"edges\[0\]\[0\] is 7, which is no id of a node: give one of the 5 ids"),
        (("order",), [], r"\['order'\] has 0 ids: give each of the 5 ids once"),
    ],
)
def test_messages_name_the_entry(path: Path, value: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        solve("equal_split", replaced(SPLIT, path, value))


def test_ids_are_given_once() -> None:
    with pytest.raises(PlanError, match=r"nodes\[1\]\['id'\] is .*: give each id once"):
        solve("equal_split", replaced(SPLIT, ("model", "nodes", 1, "id"), SPLIT["model"]["nodes"][0]["id"]))


@pytest.mark.parametrize("kind", ["equal_split", "unequal_split"])
def test_cycles_are_refused(kind: str) -> None:
    first, second = SPLIT["order"][:2]
    edges = [[first, second, 0.0], [second, first, 0.0]]
    with pytest.raises(PlanError, match=r"cycle .*: give a graph without cycles"):
        solve(kind, replaced(SPLIT, ("model", "edges"), edges))


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["", "other", "plan", None, 3])
def test_unknown_kinds_are_refused(kind: Any) -> None:
    with pytest.raises(PlanError, match=r"is not known: give one of chain, equal_split, .*, width_depth"):
        solve(kind, {})


@pytest.mark.every_case
@pytest.mark.parametrize("problem", [None, [], "text", 3])
def test_a_problem_is_a_mapping(problem: Any) -> None:
    with pytest.raises(PlanError, match="give a mapping in the form of kind 'twobw'"):
        solve("twobw", problem)


def test_ids_may_be_texts() -> None:
    problem = copy.deepcopy(SPLIT)
    for node in problem["model"]["nodes"]:
        node["id"] = f"node{node['id']}"
    problem["model"]["edges"] = [[f"node{a}", f"node{b}", size] for a, b, size in problem["model"]["edges"]]
    problem["order"] = [f"node{id}" for id in problem["order"]]
    found, plain = solve("equal_split", problem), solve("equal_split", SPLIT)
    assert found.objective == plain.objective
    assert found.plan is not None
    assert str(found.plan).count("node") >= 5


def test_the_gap_is_relative_and_none_without_a_bound() -> None:
    assert Solution(objective=2.0, plan=[], bound=1.5).gap == 0.25
    assert Solution(objective=4.0, plan=[], bound=5.0).gap == 0.25
    assert Solution(objective=0.0, plan=[], bound=0.0).gap == 0
    assert Solution(objective=2.0, plan=[], bound=None).gap is None
    assert Solution(objective=None, plan=None, bound=None).gap is None
