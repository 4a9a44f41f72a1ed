"""The optimum of the simulator is that of a search through everything. What decides comes near it, within memory."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_ext.data.tuning.rule import Rule
from hydra_ext.data.tuning.simulator import (
    Machine,
    Problem,
    SimulatedPipeline,
    StageCost,
    changed,
    random_problem,
)
from hydra_ext.data.tuning.views import View

MEBIBYTE = 2**20


class Decides(Protocol):
    def decide(self, view: View) -> tuple[int, ...]: ...


# ---- the simulator --------------------------------------------------------------------------------------------------


def costs() -> st.SearchStrategy[StageCost]:
    seconds = st.integers(0, 8).map(lambda count: count / 1000)
    return st.builds(StageCost, seconds, seconds, st.integers(1, 5).map(lambda count: count * MEBIBYTE)).filter(
        lambda cost: cost.compute + cost.wait > 0
    )


@given(
    stages=st.lists(costs(), min_size=1, max_size=3),
    cores=st.integers(1, 8),
    room=st.integers(0, 12),
    step=st.integers(2, 20),
)
@settings(deadline=None)
def test_filling_what_is_lowest_gives_the_highest_rate(
    stages: list[StageCost], cores: int, room: int, step: int
) -> None:
    least = sum(stage.worker_bytes for stage in stages)
    problem = Problem(tuple(stages), Machine(cores, least + room * MEBIBYTE, step / 1000))
    possible = [
        workers
        for workers in itertools.product(range(1, 14), repeat=len(stages))
        if problem.memory(workers) <= problem.machine.memory
    ]
    best = problem.best()
    assert problem.rate(best) == max(map(problem.rate, possible))
    assert best in possible
    fewer = [workers for workers in possible if sum(workers) < sum(best)]
    assert not fewer or max(map(problem.rate, fewer)) < problem.rate(best)


def test_service_times_say_what_a_worker_takes() -> None:
    problem = Problem(
        (StageCost(0.002, 0.001, MEBIBYTE), StageCost(0.0, 0.004, 2 * MEBIBYTE)), Machine(1, 10 * MEBIBYTE, 0.001)
    )
    pipeline = SimulatedPipeline(problem, noise=0.0, seed=0)
    view = pipeline.view()
    assert view.rate == 250  # of the second stage
    assert [stage.service for stage in view.stages] == [0.003, 0.004]
    assert view.starved == 0.75
    assert (view.memory, view.limit) == (3 * MEBIBYTE, 10 * MEBIBYTE)
    pipeline.workers = (2, 4)
    view = pipeline.view()
    assert view.rate == 500  # one core, 2 ms
    assert view.stages[0].service == pytest.approx(2 / 500)  # two workers are busy all the time
    assert view.stages[1].service == 0.004


def test_intervals_differ_by_the_noise() -> None:
    def rates(seed: int) -> list[float]:
        pipeline = SimulatedPipeline(random_problem(3), noise=0.1, seed=seed)
        return [pipeline.view().rate for _ in range(100)]

    true = SimulatedPipeline(random_problem(3), noise=0.0, seed=0).view().rate
    assert rates(1) == rates(1) != rates(2)
    assert all(0.9 * true <= rate <= 1.1 * true for rate in rates(1))
    assert max(rates(1)) - min(rates(1)) > 0.15 * true


# ---- what decides ---------------------------------------------------------------------------------------------------


def shares(
    decides: Decides, pipeline: SimulatedPipeline, intervals: int, *, may_begin_above: bool = False
) -> list[float]:
    """Of the highest rate, interval by interval. Memory is looked at on the way."""
    top = pipeline.problem.rate(pipeline.problem.best())
    found = []
    for interval in range(intervals):
        view = pipeline.view()
        assert view.memory <= view.limit or (may_begin_above and not interval)
        found.append(pipeline.problem.rate(pipeline.workers) / top)
        pipeline.workers = decides.decide(view)
        assert len(pipeline.workers) == len(view.stages)
        assert min(pipeline.workers) >= 1
    return found


@given(st.integers(0, 999), st.integers(1, 6), st.sampled_from([0.0, 0.01, 0.03]))
@settings(deadline=None, max_examples=60)
def test_the_rule_comes_near_the_best_and_again_after_a_change(seed: int, stages: int, noise: float) -> None:
    rule, pipeline = Rule(), SimulatedPipeline(random_problem(seed, stages=stages), noise=noise, seed=seed)
    assert shares(rule, pipeline, 31)[30] >= 0.95
    pipeline.problem = changed(pipeline.problem, seed)
    assert shares(rule, pipeline, 31, may_begin_above=True)[30] >= 0.95


@pytest.mark.parametrize(("seed", "noise"), [(17, 0.0), (39, 0.0), (60, 0.0), (83, 0.0), (96, 0.1), (177, 0.1)])
def test_the_rule_soon_sees_a_change_where_it_had_settled(seed: int, noise: float) -> None:
    """The seeds are those of problems where it would wait for long, or where noise would hide what was gained."""
    rule, pipeline = Rule(), SimulatedPipeline(random_problem(seed), noise=noise, seed=seed)
    shares(rule, pipeline, 100)
    pipeline.problem = changed(pipeline.problem, seed)
    assert shares(rule, pipeline, 31, may_begin_above=True)[30] >= 0.95


def settled_changes(noise: float, make: Callable[[], Decides]) -> float:
    """How often workers change, for each interval behind the 30th."""
    counts = []
    for seed in range(20):
        decides, pipeline = make(), SimulatedPipeline(random_problem(seed), noise=noise, seed=seed)
        shares(decides, pipeline, 30)
        seen: list[Sequence[int]] = []
        for _ in range(70):
            seen.append(pipeline.workers)
            pipeline.workers = decides.decide(pipeline.view())
        counts.append(sum(a != b for a, b in itertools.pairwise(seen)) / len(seen))
    return statistics.fmean(counts)


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.1])
def test_the_rule_seldom_tries_what_gains_nothing(noise: float) -> None:
    assert settled_changes(noise, Rule) < 0.05


@pytest.mark.parametrize("noise", [0.02, 0.05])
def test_workers_do_not_become_ever_more_where_cores_bind(noise: float) -> None:
    """Two workers have the highest rate. What differs by chance is no reason for more."""
    problem = Problem((StageCost(0.05, 0.0, 2**20),), Machine(2, 2**30, 0.01))
    kept = []
    for seed in range(20):
        rule, pipeline = Rule(), SimulatedPipeline(problem, noise=noise, seed=seed)
        shares(rule, pipeline, 400)
        kept.append(pipeline.workers[0])
    assert statistics.median(kept) <= 3
    assert max(kept) <= 8


def test_the_rule_takes_back_at_once_what_is_above_the_limit() -> None:
    problem = random_problem(1)
    pipeline, rule = SimulatedPipeline(problem, noise=0.0, seed=0), Rule()
    shares(rule, pipeline, 30)
    machine = replace(problem.machine, memory=problem.memory([1] * 5))
    pipeline.problem = replace(problem, machine=machine)
    shares(rule, pipeline, 100, may_begin_above=True)
    assert pipeline.workers == (1,) * 5
