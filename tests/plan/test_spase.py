"""Schedules of jobs, against all schedules of a few jobs, an evaluator of its own, a MILP, and simple rules.

`TestKnownDefects` has what was wrong in the solver that Saturn's authors released.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_ext.errors import PlanError
from hydra_ext.plan import Solution, solve
from support.plan.jobs import Problem, curves, judge, make_problem, seconds, shortest, small_problem
from support.plan.milp import makespan_by_milp

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from job_baselines import drawn, largest_first, makespan_of, optimus, smallest_first

HOUR = 3600.0
FIGURE_4: Problem = {  # of Saturn
    "gpus": 8,
    "nodes": [4, 4],
    "jobs": [
        {"name": name, "options": [{"gpus": gpus, "runtime_s": hours * HOUR} for gpus, hours in curve]}
        for name, curve in [
            ("A", [(2, 10), (3, 8), (4, 7)]),
            ("B", [(1, 40), (2, 30), (3, 27), (4, 25)]),
            ("C", [(4, 24)]),
        ]
    ],
}
# Seconds of a job by GPUs: offloading ends with more of them, or communication grows.
SUPER_LINEAR = [(1, 1600.0), (2, 700.0), (4, 280.0), (8, 100.0)]
PLATEAU = [(1, 1600.0), (2, 900.0), (4, 700.0), (8, 650.0)]


def checked(problem: Problem, **settings: int) -> tuple[Solution, float]:
    """The solution and its makespan, which the evaluator of the tests confirms."""
    found = solve("spase", problem, **settings)
    assert found.plan is not None
    assert found.bound is not None
    makespan = judge(problem, found.plan)  # type: ignore[arg-type]
    assert found.objective == makespan
    assert plain_bound(problem) * (1 - 1e-12) <= found.bound <= makespan
    return found, makespan


def plain_bound(problem: Problem) -> float:
    largest = max(problem["nodes"])
    fitting = [[each for each in job["options"] if each["gpus"] <= largest] for job in problem["jobs"]]
    runs = [
        [(each["gpus"], seconds(job, each)) for each in of] for job, of in zip(problem["jobs"], fitting, strict=True)
    ]
    area = sum(min(gpus * time for gpus, time in of) for of in runs)
    longest = max((min(time for _, time in of) for of in runs), default=0.0)
    return float(max(area / sum(problem["nodes"]), longest))


def test_the_published_example_is_proved_to_be_the_best() -> None:
    found, makespan = checked(FIGURE_4)
    assert makespan == 30 * HOUR == found.bound
    assert found.gap == 0


@pytest.mark.cases(20)
@pytest.mark.parametrize("seed", range(60))
def test_a_few_jobs_are_solved_as_exhaustive_search_does(seed: int) -> None:
    problem = small_problem(seed)
    found, makespan = checked(problem)
    assert makespan == shortest(problem) == found.bound


options = st.lists(
    st.fixed_dictionaries({"gpus": st.integers(1, 3), "runtime_s": st.integers(0, 12).map(float)}),
    min_size=1,
    max_size=3,
)


@given(nodes=st.lists(st.integers(1, 3), min_size=1, max_size=2), jobs=st.lists(options, max_size=3))
def test_any_few_jobs_are_solved_or_refused(nodes: list[int], jobs: list[list[dict[str, Any]]]) -> None:
    problem = {"nodes": nodes, "jobs": [{"name": f"job{i}", "options": each} for i, each in enumerate(jobs)]}
    least = [min(option["gpus"] for option in each) for each in jobs]
    if any(gpus > max(nodes) for gpus in least):
        with pytest.raises(PlanError, match=f"job{next(i for i, gpus in enumerate(least) if gpus > max(nodes))}'"):
            solve("spase", problem)
        return
    found, makespan = checked(problem)
    assert makespan == shortest(problem) == found.bound


@pytest.mark.parametrize("nodes", [[8], [2, 2, 4, 8], [8, 8], [128], [3, 5]])
@pytest.mark.parametrize("jobs", [9, 25])
def test_more_jobs_have_a_plan_and_a_bound(jobs: int, nodes: Sequence[int]) -> None:
    problem = make_problem(random.Random(jobs + len(nodes)), jobs=jobs, nodes=nodes, options=4, longest=10**6)
    found, makespan = checked(problem)
    rules = [makespan_of(problem, rule(problem)) for rule in (largest_first, smallest_first, optimus)]
    assert makespan <= min(rules)
    assert found.gap is not None
    assert found.gap < 0.3


def test_equal_seeds_have_equal_plans() -> None:
    problem = make_problem(random.Random(3), jobs=17, nodes=[8], options=4, longest=10**6)
    found = solve("spase", problem, seed=5)
    assert solve("spase", problem, seed=5) == found
    assert solve("spase", problem, seed=6).plan != found.plan
    assert solve("spase", problem) == solve("spase", problem, seed=0, effort=1)


def test_more_effort_is_never_worse() -> None:
    problem = make_problem(random.Random(4), jobs=17, nodes=[4, 4], options=4, longest=10**6)
    makespans = [checked(problem, effort=effort)[1] for effort in (1, 2)]
    assert makespans == sorted(makespans, reverse=True)


@pytest.mark.parametrize(("curve", "nodes"), [(SUPER_LINEAR, [8]), (PLATEAU, [8]), (PLATEAU, [8, 8])])
def test_each_rule_is_bad_for_one_kind_of_jobs_and_the_plan_for_none(curve: Any, nodes: list[int]) -> None:
    problem = curves(12, nodes, curve)
    _, makespan = checked(problem)
    largest, smallest = (makespan_of(problem, rule(problem)) for rule in (largest_first, smallest_first))
    assert makespan <= min(largest, smallest, makespan_of(problem, optimus(problem)))
    assert max(largest, smallest) >= 1.9 * makespan


def test_both_kinds_of_jobs_together_beat_every_rule() -> None:
    jobs = [*curves(6, [8], SUPER_LINEAR)["jobs"], *curves(6, [8], PLATEAU)["jobs"]]
    problem = {"nodes": [8], "jobs": jobs}
    _, makespan = checked(problem)
    rules = [makespan_of(problem, rule(problem)) for rule in (largest_first, smallest_first, optimus)]
    assert min(rules) >= 1.25 * makespan
    assert min(makespan_of(problem, drawn(problem, seed)) for seed in range(20)) > 1.25 * makespan


def test_plans_of_rules_are_valid() -> None:
    for seed in range(40):
        problem = small_problem(seed)
        for plan in (largest_first(problem), smallest_first(problem), optimus(problem), drawn(problem, 1)):
            assert makespan_of(problem, plan) == judge(problem, plan)


def test_seconds_may_be_given_by_minibatch() -> None:
    options = [{"gpus": 1, "seconds_per_minibatch": 0.25, "memory_bytes": None}, {"gpus": 2, "runtime_s": 2.0}]
    problem = {"nodes": [2], "jobs": [{"name": "a", "minibatches": 10.0, "options": options}]}
    found, makespan = checked(problem)
    assert makespan == 2.0
    assert found.plan == [[1, 0, 0.0]]
    assert checked({**problem, "nodes": [1]})[1] == 2.5


def test_no_jobs_take_no_time() -> None:
    assert solve("spase", {"nodes": [8], "jobs": []}) == Solution(objective=0.0, plan=[], bound=0.0)


GOOD: Problem = {"nodes": [2, 4], "jobs": [{"name": "a", "options": [{"gpus": 2, "runtime_s": 3.0}]}]}


def with_options(*options: dict[str, Any], **more: Any) -> Problem:
    return {"nodes": [2, 4], "jobs": [{"name": "wide", "options": list(options), **more}]}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("problem", "text"),
    [
        ({**GOOD, "nodes": []}, "there is no node: give at least one"),
        ({**GOOD, "nodes": [5000]}, "5000 GPUs: give a number from 1 to 4096"),
        ({**GOOD, "gpus": 8}, r"'gpus'\] is 8, and problem\['nodes'\] have 6: give equal numbers"),
        (with_options(), "job 'wide' has no options: give at least one"),
        (
            with_options({"gpus": 8, "runtime_s": 1.0}, {"gpus": 6, "runtime_s": 1.0}),
            "job 'wide' fits no node: .* 6 GPUs, .* has 4: give a node of at least 6 GPUs",
        ),
        (with_options({"gpus": 1}), "has no 'runtime_s': add it"),
        (with_options({"gpus": 1}, minibatches=3), "has no 'seconds_per_minibatch': add it"),
        (with_options({"gpus": 1, "seconds_per_minibatch": 1.0}), "has no 'minibatches': add it"),
        (with_options({"gpus": 1, "runtime_s": float("nan")}), "finite number"),
        (with_options({"gpus": 1, "runtime_s": -1.0}), "finite number of at least 0"),
        (with_options({"gpus": 1, "seconds_per_minibatch": 1e300}, minibatches=1e300), "wide.*finite number"),
        (with_options({"gpus": 0, "runtime_s": 1.0}), "give a whole number"),
    ],
)
def test_senseless_problems_are_refused(problem: Problem, text: str) -> None:
    solve("spase", GOOD)
    with pytest.raises(PlanError, match=text):
        solve("spase", problem)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"effort": 0}, "effort=0: give a whole number of at least 1"),
        ({"effort": 1.5}, "give a whole number"),
        ({"seed": -1}, "give a whole number"),
    ],
)
def test_senseless_settings_are_refused(settings: Any, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        solve("spase", GOOD, **settings)


def test_other_kinds_take_no_seed_or_no_effort() -> None:
    with pytest.raises(PlanError, match="seed=1 is for kind spase or units: leave it out for kind 'chain'"):
        solve("chain", {}, seed=1)
    with pytest.raises(PlanError, match="effort=1 is for kind spase: leave it out for kind 'units'"):
        solve("units", {}, effort=1)


@pytest.mark.cases(6)
@pytest.mark.parametrize("seed", range(20))
def test_a_milp_finds_nothing_better(seed: int) -> None:
    rng = random.Random(seed)
    nodes = rng.choice(([3], [4], [2, 2], [1, 3]))
    problem = make_problem(rng, jobs=rng.randint(4, 6), nodes=nodes, options=3, longest=6)
    found, makespan = checked(problem)
    assert found.gap == 0
    assert makespan_by_milp(problem, int(makespan)) == pytest.approx(makespan, abs=1e-6)


class TestKnownDefects:
    @pytest.mark.parametrize("gpus", [4, 6, 12, 16])
    def test_nodes_need_not_have_8_gpus(self, gpus: int) -> None:
        problem = curves(3, [gpus], [(gpus, 10.0), (gpus // 2, 15.0)])
        assert checked(problem)[1] == 25.0

    def test_settings_have_no_place_that_could_be_wrong(self) -> None:
        with pytest.raises(TypeError, match="positional"):
            solve("spase", GOOD, 5)  # type: ignore[misc]

    def test_the_makespan_is_told_and_not_zero(self) -> None:
        found, makespan = checked(curves(5, [2], [(1, 10.0)]))
        assert found.objective == makespan == 30.0

    def test_what_does_not_fit_has_no_runtime_in_place_of_infinity(self) -> None:
        """Even where another runtime is as large as a stand-in would be."""
        problem = {
            "nodes": [1, 2],
            "jobs": [
                {"name": "wide", "options": [{"gpus": 2, "runtime_s": 1.0}]},
                {"name": "long", "options": [{"gpus": 1, "runtime_s": 1e12}, {"gpus": 4, "runtime_s": 1e-3}]},
            ],
        }
        found, makespan = checked(problem)
        assert makespan == 1e12
        assert found.gap == 0

    @pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9, 1e15])
    def test_a_large_number_allows_no_violation(self, scale: float) -> None:
        """Nothing depends on how seconds compare with a constant."""
        problem = curves(7, [4], [(1, 7 * scale), (3, 3 * scale)])
        assert checked(problem)[1] == pytest.approx(shortest_of_seven() * scale, rel=1e-12)


def shortest_of_seven() -> float:
    return checked(curves(7, [4], [(1, 7.0), (3, 3.0)]))[1]
