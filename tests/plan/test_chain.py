"""Chains cut into stages, against exhaustive search, an evaluator of its own, and published values."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from hydra_ext.errors import InvalidArgument, PlanDoesNotFit, PlanError
from hydra_ext.plan import Boundary, Event, Partition, SharedParameters, partition_chain

SAME = 1e-9  # relative; sums in another order


@dataclass(frozen=True)
class Problem:
    events: tuple[Event, ...]
    boundaries: tuple[Boundary, ...]
    stages: int
    shared: tuple[SharedParameters, ...] = ()
    bandwidth: float = math.inf
    latency: float = 0.0
    overlapped: bool = False
    versions: int = 1
    memory: tuple[int | None, ...] | None = None

    def solve(self) -> Partition:
        return partition_chain(
            self.events,
            self.boundaries,
            stages=self.stages,
            shared=self.shared,
            bandwidth=self.bandwidth,
            latency=self.latency,
            overlapped=self.overlapped,
            versions=self.versions,
            memory=self.memory,
        )


@dataclass(frozen=True)
class Judged:
    """What a division costs, worked out here."""

    period: float
    crossing: int
    squares: float
    nbytes: tuple[int, ...]


def judge(problem: Problem, cuts: tuple[int, ...]) -> Judged:
    bounds = (0, *cuts, len(problem.events))
    seconds, nbytes = [], []
    for stage, (begin, end) in enumerate(pairwise(bounds)):
        own = problem.events[begin:end]
        computing = sum(event.forward_seconds + event.backward_seconds for event in own)
        ends = [edge for edge in (begin, end) if 0 < edge < len(problem.events)]
        talking = sum(
            2 * (problem.latency + problem.boundaries[edge - 1].crossing_bytes / problem.bandwidth) for edge in ends
        )
        seconds.append(max(computing, talking) if problem.overlapped else computing + talking)
        parameters = sum(event.parameter_bytes for event in own)
        parameters += sum(each.nbytes for each in problem.shared if any(begin <= use < end for use in each.events))
        activations = sum(event.activation_bytes for event in own)
        nbytes.append(problem.versions * parameters + (problem.stages - stage) * activations)
    crossing = sum(problem.boundaries[cut - 1].crossing_bytes for cut in cuts)
    return Judged(max(seconds), crossing, sum(each * each for each in seconds), tuple(nbytes))


def all_divisions(problem: Problem) -> list[Judged]:
    """Of those that are allowed."""
    possible = [number + 1 for number, boundary in enumerate(problem.boundaries) if boundary.possible]
    judged = [judge(problem, cuts) for cuts in combinations(possible, problem.stages - 1)]
    limits = problem.memory or (None,) * problem.stages
    return [
        each
        for each in judged
        if all(limit is None or held <= limit for held, limit in zip(each.nbytes, limits, strict=True))
    ]


def random_problem(seed: int) -> Problem:
    draw = random.Random(seed)
    count = draw.randint(1, 10)
    small = draw.random() < 0.5  # few different numbers: many ties

    def seconds() -> float:
        return float(draw.randint(0, 3)) if small else draw.random()

    def nbytes() -> int:
        return draw.randint(0, 3) if small else draw.randint(0, 10**9)

    events = tuple(
        Event(
            forward_seconds=seconds(),
            backward_seconds=seconds(),
            parameter_bytes=nbytes(),
            activation_bytes=nbytes(),
        )
        for _ in range(count)
    )
    boundaries = tuple(Boundary(crossing_bytes=nbytes(), possible=draw.random() < 0.85) for _ in range(count - 1))
    shared = tuple(
        SharedParameters(nbytes=nbytes(), events=tuple(draw.choices(range(count), k=draw.randint(1, 3))))
        for _ in range(draw.randint(0, 2))
    )
    stages = draw.randint(1, 5)
    problem = Problem(
        events,
        boundaries,
        stages,
        shared,
        bandwidth=draw.choice([math.inf, 1.0 if small else 1e9]),
        latency=draw.choice([0.0, 0.25]),
        overlapped=draw.random() < 0.5,
        versions=draw.randint(1, 3),
    )
    if draw.random() < 0.6:
        total = sum(event.parameter_bytes + event.activation_bytes for event in events)
        limits = [draw.choice([None, int(total * draw.uniform(0.3, 3.0))]) for _ in range(stages)]
        problem = replace(problem, memory=tuple(limits))
    return problem


def alike(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=SAME, abs_tol=1e-12)


def test_random_chains_are_divided_as_exhaustive_search_does() -> None:
    solved = refused = 0
    for seed in range(1500):
        problem = random_problem(seed)
        allowed = all_divisions(problem)
        try:
            found = problem.solve()
        except PlanError:
            assert not allowed, seed
            refused += 1
            continue
        solved += 1
        own = judge(problem, found.cuts)
        period = min(each.period for each in allowed)
        tied = [each for each in allowed if alike(each.period, period)]
        crossing = min(each.crossing for each in tied)
        squares = min(each.squares for each in tied if each.crossing == crossing)
        assert alike(own.period, period), seed
        assert own.crossing == crossing == found.crossing_bytes, seed
        assert alike(own.squares, squares), seed
    assert solved > 600
    assert refused > 200


def test_what_is_reported_is_what_the_division_costs() -> None:
    for seed in range(300):
        problem = random_problem(seed)
        try:
            found = problem.solve()
        except PlanError:
            continue
        own = judge(problem, found.cuts)
        assert alike(found.period_seconds, own.period)
        assert tuple(stage.nbytes for stage in found.stages) == own.nbytes
        assert max(stage.seconds for stage in found.stages) == found.period_seconds
        assert [stage.end for stage in found.stages] == [*found.cuts, len(problem.events)]
        combine = max if problem.overlapped else lambda one, other: one + other
        for stage in found.stages:
            assert alike(stage.seconds, combine(stage.compute_seconds, stage.communication_seconds))


def test_what_does_not_fit_names_a_stage_that_lacks_and_the_least_that_is_needed() -> None:
    seen = 0
    for seed in range(1500):
        problem = random_problem(seed)
        anywhere = all_divisions(replace(problem, memory=None))
        if not anywhere or all_divisions(problem):
            continue
        seen += 1
        limits = problem.memory or ()
        lacking = min(
            max(held - limit for held, limit in zip(each.nbytes, limits, strict=True) if limit is not None)
            for each in anywhere
        )
        with pytest.raises(PlanDoesNotFit) as caught:
            problem.solve()
        error = caught.value
        assert error.needed_bytes - error.limit_bytes == lacking > 0
        assert error.limit_bytes == limits[error.stage]
        assert f"stage {error.stage}, events" in str(error)
        enough = tuple(None if limit is None else limit + lacking for limit in limits)
        replace(problem, memory=enough).solve()
    assert seen > 50


def test_more_memory_or_bandwidth_or_less_latency_is_never_worse() -> None:
    for seed in range(400):
        problem = random_problem(seed)
        try:
            period = problem.solve().period_seconds
        except PlanError:
            continue
        roomier = None if problem.memory is None else tuple(limit and limit * 2 for limit in problem.memory)
        for better in (
            replace(problem, memory=roomier),
            replace(problem, bandwidth=problem.bandwidth * 3),
            replace(problem, latency=problem.latency / 2),
            replace(problem, overlapped=True),
            replace(problem, boundaries=tuple(replace(each, possible=True) for each in problem.boundaries)),
        ):
            assert better.solve().period_seconds <= period * (1 + SAME), seed


def test_scaling_all_times_scales_the_period_and_nothing_else() -> None:
    for seed in range(200):
        problem = random_problem(seed)
        try:
            found = problem.solve()
        except PlanError:
            continue
        scaled = replace(
            problem,
            events=tuple(
                replace(each, forward_seconds=each.forward_seconds * 8, backward_seconds=each.backward_seconds * 8)
                for each in problem.events
            ),
            latency=problem.latency * 8,
            bandwidth=problem.bandwidth / 8,
        ).solve()
        assert scaled.period_seconds == found.period_seconds * 8  # a power of two: to the bit
        assert scaled.cuts == found.cuts


def test_without_memory_and_communication_more_stages_are_never_slower() -> None:
    for seed in range(100):
        draw = random.Random(seed)
        times = [draw.random() for _ in range(12)]
        events = [Event(forward_seconds=time, backward_seconds=2 * time) for time in times]
        periods = [partition_chain(events, [Boundary()] * 11, stages=stages).period_seconds for stages in range(1, 13)]
        assert all(later <= earlier * (1 + SAME) for earlier, later in pairwise(periods))
        assert alike(periods[0], 3 * sum(times))
        assert alike(periods[-1], 3 * max(times))


PROFILED = json.loads(Path(__file__).with_name("profiled_chains.json").read_text())["chains"]


@pytest.mark.parametrize("chain", PROFILED, ids=[chain["name"] for chain in PROFILED])
def test_measured_networks_reach_the_published_periods(chain: dict[str, Any]) -> None:
    events = [
        Event(forward_seconds=forward, backward_seconds=backward)
        for forward, backward in zip(chain["forward"], chain["backward"], strict=True)
    ]
    boundaries = [Boundary(crossing_bytes=crossing) for crossing in chain["crossing_bytes"]]
    assert set(chain["periods"]) == {"2", "4", "16"}
    for stages, period in chain["periods"].items():
        assert alike(partition_chain(events, boundaries, stages=int(stages)).period_seconds, period)
    # There, computing and communicating overlap; with two stages that is this cost, in milliseconds.
    two = partition_chain(events, boundaries, stages=2, bandwidth=1e6, overlapped=True)
    assert alike(two.period_seconds, chain["two_stages_at_1e9_bytes_a_second"])


@pytest.mark.parametrize(
    ("blocks", "stages", "seconds", "io", "bandwidth", "weights", "optimizer", "activations", "period", "nbytes"),
    [
        (24, 4, 0.009305762474666666, 8388608, 1e11, 25192448, 176347136, 310378496, 0.056002347008, 8843030528),
        (24, 8, 0.009305762474666666, 8388608, 3.125e9, 25192448, 176347136, 310378496, 0.033285996544, 8196388864),
        (32, 16, 0.0270582939648, 9437184, 3.125e9, 127461888, 892233216, 328204288, 0.0601563856896, 12947846144),
    ],
)
def test_equal_blocks_cost_what_the_2bw_papers_model_says(
    blocks: int,
    stages: int,
    seconds: float,
    io: int,
    bandwidth: float,
    weights: int,
    optimizer: int,
    activations: int,
    period: float,
    nbytes: int,
) -> None:
    # The paper's stage sends and receives `io` bytes together, holds two versions of weights and one optimizer state,
    # and the first stage `stages` microbatches of activations and of `io`.
    event = Event(
        forward_seconds=seconds / 3,
        backward_seconds=2 * seconds / 3,
        parameter_bytes=weights + optimizer // 2,
        activation_bytes=activations + io * stages // blocks,
    )
    found = partition_chain(
        [event] * blocks,
        [Boundary(crossing_bytes=io // 2)] * (blocks - 1),
        stages=stages,
        bandwidth=bandwidth,
        versions=2,
    )
    assert found.period_seconds == pytest.approx(period, rel=1e-9)
    assert found.stages[stages // 2].end - found.stages[stages // 2].begin == blocks // stages
    assert found.stages[0].nbytes == pytest.approx(nbytes, rel=1e-6)


def test_several_hundred_events_are_planned_in_many_stages() -> None:
    draw = random.Random(0)
    events = [Event(forward_seconds=draw.random(), backward_seconds=draw.random()) for _ in range(600)]
    found = partition_chain(events, [Boundary(crossing_bytes=1)] * 599, stages=32, bandwidth=1e9)
    total = sum(event.forward_seconds + event.backward_seconds for event in events)
    assert total / 32 <= found.period_seconds <= total / 32 + 2.0


def test_a_limit_for_all_stages_is_one_for_each() -> None:
    events = [Event(forward_seconds=1, backward_seconds=1, parameter_bytes=size) for size in (4, 4, 1, 1)]
    one = partition_chain(events, [Boundary()] * 3, stages=2, memory=8)
    assert one == partition_chain(events, [Boundary()] * 3, stages=2, memory=[8, 8])
    assert partition_chain(events, [Boundary()] * 3, stages=2, memory=[5, None]).cuts == (1,)
    with pytest.raises(InvalidArgument, match="one entry for each of the 2 stages"):
        partition_chain(events, [Boundary()] * 3, stages=2, memory=[8])


@pytest.mark.parametrize(
    ("stages", "changes", "says"),
    [
        (5, {}, "5 stages need 4 cuts"),
        (0, {}, "at least one stage"),
        (2, {"bandwidth": 0.0}, "bandwidth"),
        (2, {"bandwidth": math.nan}, "bandwidth"),
        (2, {"latency": -1.0}, "latency"),
        (2, {"versions": 0}, "version"),
        (2, {"memory": -1}, "limit of memory is negative"),
        (2, {"shared": [SharedParameters(nbytes=1, events=(9,))]}, "event 9 of 4"),
    ],
)
def test_senseless_questions_are_refused(stages: int, changes: dict[str, Any], says: str) -> None:
    events = [Event(forward_seconds=1, backward_seconds=1)] * 4
    with pytest.raises(PlanError, match=says):
        partition_chain(events, [Boundary()] * 3, stages=stages, **changes)


def test_a_cut_may_be_wherever_nothing_else_is_said() -> None:
    assert Boundary().possible
