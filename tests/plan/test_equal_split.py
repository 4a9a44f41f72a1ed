"""Stages of equally many layers: against all such plans, listed here, and an evaluator of its own."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest

from hydra_ext.plan import solve
from support.plan.splits import Problem, divisors, judge, make_problem, stage_bytes, stage_time

SAME = 1e-9  # relative; sums in another order


def shares(ids: list[int], stages: int) -> list[list[int]]:
    """Equally many for each stage; what is left over goes to the last ones."""
    sizes = [len(ids) // stages + (stage >= stages - len(ids) % stages) for stage in range(stages)]
    given = iter(ids)
    return [list(itertools.islice(given, size)) for size in sizes]


def listed(problem: Problem) -> Iterator[list[list[int]]]:
    """The stages of all plans, in or out of order."""
    names = {node["id"]: node["name"] for node in problem["model"]["nodes"]}
    counted = [id for id in problem["order"] if names[id] == "ParallelTransformerLayer"]
    if not counted:
        yield from (shares(problem["order"], stages) for stages in range(1, len(names) + 1))
        return
    before = set(counted)
    for _ in names:
        before |= {a for a, b, _ in problem["model"]["edges"] if b in before}
    first = [id for id in problem["order"] if id in before and id not in counted]
    last = [id for id in problem["order"] if id not in before]
    for stages in range(1, len(counted) + 1):
        groups = shares(counted, stages)
        yield [[*first, *group] if group is groups[0] else group for group in groups[:-1]] + [
            [*(first if stages == 1 else []), *groups[-1], *last]
        ]
        yield [ids for ids in ([*first], *groups, [*last]) if ids]


def best_equal(problem: Problem) -> float | None:
    best = math.inf
    for stages in listed(problem):
        place = {id: number for number, ids in enumerate(stages) for id in ids}
        if any(place[a] > place[b] for a, b, _ in problem["model"]["edges"]):
            continue
        for replicas in divisors(problem["microbatches_per_batch"]):
            if replicas * len(stages) > min(problem["devices"], problem["microbatches_per_batch"]):
                continue
            for recompute in (False, True):
                fits = all(
                    stage_bytes(problem, len(stages) - number, ids, ids if recompute else []) <= problem["memory_bytes"]
                    for number, ids in enumerate(stages)
                )
                times = [stage_time(problem, replicas, ids, ids if recompute else []) for ids in stages]
                best = min(best, max(times)) if fits else best
    return None if math.isinf(best) else best


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("seed", range(100))
def test_no_equal_plan_is_faster(seed: int, counted: bool) -> None:
    rng = random.Random(seed)
    problem = make_problem(rng, layers=rng.randrange(1, 9), devices=12, counted=counted)
    found, best = solve("equal_split", problem), best_equal(problem)
    if best is None:
        assert found.objective is None
        assert found.plan is None
    else:
        assert found.plan is not None
        assert found.objective == pytest.approx(best, rel=SAME)
        assert judge(problem, found.plan) == pytest.approx(best, rel=SAME)
        assert found.gap == 0
        assert len({stage[0] for stage in found.plan}) == 1
        assert len({len(stage[2]) == len(stage[1]) for stage in found.plan}) == 1


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_unequal_stages_are_never_slower(seed: int, counted: bool) -> None:
    problem = make_problem(random.Random(seed), layers=8, devices=12, counted=counted)
    equal, unequal = solve("equal_split", problem), solve("unequal_split", problem)
    if equal.objective is not None:
        assert unequal.objective is not None
        assert unequal.objective <= equal.objective * (1 + SAME)


def test_an_order_that_puts_users_first_leaves_the_whole_model_as_one_stage() -> None:
    problem = make_problem(random.Random(3), layers=6, devices=4)
    ids = problem["order"]
    problem["model"]["edges"] = [[a, b, 1.0] for a, b in itertools.pairwise(ids)]
    problem |= {"order": ids[::-1], "memory_bytes": 1e9}
    found = solve("equal_split", problem)
    assert found.plan is not None
    assert len(found.plan) == 1
