"""Stages of any size: against all plans of small problems, and an evaluator of its own."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hydra_ext.errors import PlanError
from hydra_ext.plan import Solution, solve
from support.plan.splits import Problem, best_unequal, judge, make_problem

SAME = 1e-9  # relative; sums in another order


def chain(count: int, **terms: Any) -> Problem:
    """Layers in a row, of one unit of time each."""
    way = {"time": 1.0, "mem_a": 1.0, "mem_b": 0.0}
    nodes = [
        {"id": i, "name": "layer", "parameter_bytes": 0.0, "vanilla": way, "recompute": {**way, "time": 2.0}}
        for i in range(count)
    ]
    return {
        "model": {"nodes": nodes, "edges": [[i, i + 1, 0.0] for i in range(count - 1)]},
        "memory_bytes": 1e9,
        "devices": 4,
        "microbatches_per_batch": 8,
        "bandwidth_bytes_per_s": 1e9,
        **terms,
    }


def check(problem: Problem) -> Solution:
    found = solve("unequal_split", problem)
    if found.objective is None:
        assert found.plan is None
        assert found.gap is None
    else:
        assert found.plan is not None
        assert judge(problem, found.plan) == pytest.approx(found.objective, rel=SAME)
        assert found.bound is not None
        assert found.bound <= found.objective
    return found


@pytest.mark.parametrize("seed", range(150))
def test_no_plan_of_a_small_problem_is_faster(seed: int) -> None:
    rng = random.Random(seed)
    problem = make_problem(rng, layers=rng.randrange(1, 6), devices=5)
    found, best = check(problem), best_unequal(problem)
    if best is None:
        assert found.objective is None
    else:
        assert found.objective == pytest.approx(best, rel=SAME)
        assert found.gap == 0


def test_some_small_problems_fit_only_with_recomputed_layers_and_some_not_at_all() -> None:
    found = [check(make_problem(random.Random(seed), layers=5, devices=5)) for seed in range(60)]
    assert any(one.plan and any(stage[2] for stage in one.plan) for one in found)
    assert any(one.plan is None for one in found)
    assert any(one.plan and len({stage[0] for stage in one.plan}) > 1 for one in found)


def test_one_stage_on_all_devices_divides_the_time() -> None:
    assert check(chain(3, devices=4, microbatches_per_batch=4)).plan == [[4, [0, 1, 2], []]]
    assert check(chain(3, devices=4, microbatches_per_batch=4)).objective == 0.75


def test_replicas_divide_the_microbatches() -> None:
    assert check(chain(1, devices=5, microbatches_per_batch=6)).plan == [[3, [0], []]]


def test_a_stage_holds_a_microbatch_for_all_replicas_behind_it() -> None:
    # Two stages of two layers each hold 2 * 2 and 1 * 2 bytes.
    assert check(chain(4, devices=2, microbatches_per_batch=2, memory_bytes=4.0)).objective == 2.0
    found = check(chain(4, devices=2, microbatches_per_batch=2, memory_bytes=3.0))
    assert found.plan == [[1, [0], []], [1, [1, 2, 3], []]]
    assert solve("unequal_split", chain(4, devices=2, microbatches_per_batch=2, memory_bytes=2.0)).plan is None


def test_layers_beside_each_other_are_put_in_any_order() -> None:
    problem = chain(6, devices=2, microbatches_per_batch=2, memory_bytes=5.0)
    problem["model"]["edges"] = []
    for node, time in zip(problem["model"]["nodes"], (5.0, 1.0, 1.0, 4.0, 2.0, 3.0), strict=True):
        node["vanilla"] = {"time": time, "mem_a": 1.0, "mem_b": 0.0}
        node["recompute"] = node["vanilla"]
    assert check(problem).plan == [[1, [0, 5], []], [1, [1, 2, 3, 4], []]]


def ladder(count: int, seed: int) -> Problem:
    """Two rows of layers with a few edges between: it has about count² / 4 sets of layers with all their inputs."""
    rng = random.Random(seed)
    problem = chain(count, devices=8, microbatches_per_batch=8, bandwidth_bytes_per_s=100.0)
    for node in problem["model"]["nodes"]:
        node["parameter_bytes"] = rng.uniform(0, 800)
        node["vanilla"] = {"time": rng.uniform(1, 9), "mem_a": 10.0, "mem_b": 1.0}
        node["recompute"] = {"time": 1.3 * node["vanilla"]["time"], "mem_a": 1.0, "mem_b": 9.0}
    edges = [[i, i + 2, rng.uniform(0, 50)] for i in range(count - 2)]
    problem["model"]["edges"] = edges + [[i, i + 1, 5.0] for i in range(0, count - 1, 7)]
    return problem


@pytest.mark.parametrize(("memory", "fits"), [(1e9, True), (400.0, True), (30.0, False)])
def test_a_graph_of_two_rows_is_solved_exactly(memory: float, fits: bool) -> None:
    found = check({**ladder(60, 1), "memory_bytes": memory})
    assert (found.objective is not None) == fits
    assert not fits or found.gap == 0


def test_a_graph_with_too_many_downsets_gets_a_plan_and_a_bound() -> None:
    problem = ladder(40, 2)
    problem["model"]["edges"] = [edge for edge in problem["model"]["edges"] if edge[0] < 6]
    found = check(problem)
    assert found.gap is not None
    assert found.gap < 0.05


def test_equal_numbers_give_equal_plans() -> None:
    problem = ladder(30, 3)
    assert solve("unequal_split", problem) == solve("unequal_split", problem)


def test_a_long_chain_takes_no_more_downsets_than_layers() -> None:
    found = check(chain(800, devices=64, microbatches_per_batch=64))
    assert found.objective == 12.5
    assert found.gap == 0


def test_entries_that_the_kind_does_not_need_are_ignored() -> None:
    assert check({**chain(2), "order": None, "more": 3}).objective == 0.5


def test_numbers_that_no_sum_can_hold_are_refused() -> None:
    problem = chain(2)
    for node in problem["model"]["nodes"]:
        node["vanilla"] = node["recompute"] = {"time": 1e308, "mem_a": 0.0, "mem_b": 0.0}
    with pytest.raises(PlanError, match="smaller numbers"):
        solve("unequal_split", {**problem, "devices": 1})
