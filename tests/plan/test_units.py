"""Schedules of shard units, against all schedules of a few units, a judge of its own, bounds, and Hydra's cells.

`TestKnownDefects` has what was wrong in the scheduler that Hydra's authors released.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_ext import _C
from hydra_ext.errors import PlanError
from hydra_ext.plan import Solution, solve
from hydra_ext.plan.units import POLICIES, simulate
from support.plan.units import Problem, bound, chain, idles_in_vain, judge, shortest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from unit_cells import cell, sharded

SAME = 1e-9

# Whole seconds, so that sums are exact.
unit = st.tuples(st.integers(0, 6).map(float), st.integers(0, 1), st.integers(0, 5).map(float)).map(list)


def jobs(most: int, units: int) -> st.SearchStrategy[list[dict[str, Any]]]:
    one = st.fixed_dictionaries({"name": st.just("job"), "units": st.lists(unit, min_size=1, max_size=units)})
    return st.lists(one, min_size=1, max_size=most)


def checked(problem: Problem) -> tuple[Solution, float]:
    """The solution and its makespan, which the judge of the tests confirms."""
    found = solve("units", problem)
    assert found.plan is not None
    assert found.bound is not None
    makespan = judge(problem, found.plan)  # type: ignore[arg-type]
    assert found.objective == pytest.approx(makespan, rel=SAME)
    assert bound(problem) * (1 - SAME) <= found.bound <= makespan * (1 + SAME)
    return found, makespan


@settings(deadline=None)
@given(jobs=jobs(3, 2), devices=st.integers(1, 2), link=st.sampled_from([None, 1.0]))
def test_no_schedule_is_below_the_bound_or_shorter_than_the_shortest(
    jobs: list[dict[str, Any]], devices: int, link: float | None
) -> None:
    problem = {"devices": devices, "jobs": jobs, "link": link}
    best = shortest(problem)
    for policy in POLICIES:
        found, makespan = checked({**problem, "policy": policy})
        assert found.bound is not None
        assert found.bound <= best <= makespan


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 3), min_size=1, max_size=3), devices=st.integers(1, 2))
def test_equal_units_are_scheduled_as_exhaustive_search_does(lengths: list[int], devices: int) -> None:
    problem = {"devices": devices, "jobs": [{"name": "a", "batches": n, "unit_seconds": [2.0]} for n in lengths]}
    assert checked(problem)[1] == shortest(problem)


@settings(deadline=None)
@given(jobs=jobs(9, 8), devices=st.integers(1, 4), link=st.sampled_from([None, 0.5, 2.0]))
def test_every_unit_runs_once_in_order_and_no_device_idles_in_vain(
    jobs: list[dict[str, Any]], devices: int, link: float | None
) -> None:
    for policy in POLICIES:
        problem = {"devices": devices, "jobs": jobs, "link": link, "policy": policy}
        found, _ = checked(problem)
        if link is None:
            assert not idles_in_vain(problem, found.plan)  # type: ignore[arg-type]


@settings(deadline=None)
@given(jobs=jobs(9, 8), devices=st.integers(1, 4))
def test_the_longest_first_end_within_a_unit_of_the_bound(jobs: list[dict[str, Any]], devices: int) -> None:
    problem = {"devices": devices, "jobs": jobs}
    longest = max(seconds for job in jobs for seconds, _, _ in job["units"])
    assert checked(problem)[1] <= bound(problem) + longest


@settings(deadline=None)
@given(jobs=jobs(6, 6), devices=st.integers(1, 3), link=st.sampled_from([None, 1.0]), seed=st.integers(0, 9))
def test_equal_seeds_have_equal_plans(jobs: list[dict[str, Any]], devices: int, link: float | None, seed: int) -> None:
    for policy in POLICIES:
        problem = {"devices": devices, "jobs": jobs, "link": link, "policy": policy}
        assert solve("units", problem, seed=seed) == solve("units", problem, seed=seed)


def test_seeds_are_for_random_alone() -> None:
    for policy in POLICIES:
        problem = {**cell(0, models=8, devices=4, equal=True), "policy": policy}
        plans = [solve("units", problem, seed=seed).plan for seed in (1, 2)]
        assert (plans[0] == plans[1]) == (policy != "random")


class TestOnline:
    """A run asks unit by unit, and takes other times than were foreseen."""

    @settings(deadline=None)
    @given(data=st.data(), jobs=jobs(6, 5), devices=st.integers(1, 3), link=st.sampled_from([None, 1.0]))
    def test_any_order_of_ends_runs_each_unit_once(
        self, data: st.DataObject, jobs: list[dict[str, Any]], devices: int, link: float | None
    ) -> None:
        policy = data.draw(st.sampled_from(sorted(POLICIES)))
        chains = [chain(job) for job in jobs]
        scheduler = _C.UnitScheduler(
            devices, [("job", units, 1) for units in chains], link=link, policy=POLICIES[policy], seed=1
        )
        begun, running = [0] * len(chains), dict[int, int]()
        for now in itertools.count():
            free = [device for device in range(devices) if device not in running]
            for device in data.draw(st.permutations(free)):
                turn = scheduler.next(device, now)
                eligible = [
                    job for job, units in enumerate(chains) if begun[job] < len(units) and job not in running.values()
                ]
                assert (turn is None) == (not eligible)
                if turn is None:
                    continue
                job, place, begin, end = turn
                assert job in eligible
                assert place == begun[job]
                assert end - begin == pytest.approx(chains[job][place][0])
                running[device] = job
                begun[job] += 1
                assert scheduler.remaining(job) == sum(seconds for seconds, _, _ in chains[job][begun[job] :])
                if data.draw(st.booleans()):  # a run may leave this out
                    scheduler.ahead(device, begin)
            if not running:
                break
            device = data.draw(st.sampled_from(sorted(running)))
            scheduler.finished(device)
            del running[device]
        assert begun == [len(units) for units in chains]
        assert scheduler.units_left == 0

    def test_what_is_loaded_ahead_runs_next(self) -> None:
        """On one device nothing changes the decision, whatever the policy."""
        for policy in ("lrtf", "round_robin", "random", "shortest_first"):
            units = [(1.0, 0, 1.0), (2.0, 1, 1.0), (1.0, 0, 1.0)]
            scheduler = _C.UnitScheduler(1, [("a", units, 4)] * 3, link=1.0, policy=POLICIES[policy], seed=3)
            turn = scheduler.next(0, 0.0)
            while turn is not None:
                foreseen = scheduler.ahead(0, turn[2])
                scheduler.finished(0)
                turn = scheduler.next(0, turn[3])
                assert foreseen == (None if turn is None else turn[0])

    def test_staying_runs_a_shards_units_while_the_next_shard_loads(self) -> None:
        units = [(1.0, 0, 2.0), (1.0, 0, 2.0), (1.0, 1, 2.0)]
        policy = POLICIES["lrtf_affinity"]
        scheduler = _C.UnitScheduler(1, [("a", units, 1), ("b", units, 1)], link=1.0, policy=policy, seed=0)
        assert scheduler.next(0, 0.0) == (0, 0, 2.0, 3.0)
        assert scheduler.ahead(0, 2.0) == 1
        scheduler.finished(0)
        assert scheduler.next(0, 3.0) == (0, 1, 3.0, 4.0)
        scheduler.finished(0)
        assert scheduler.next(0, 4.0) == (1, 0, 4.0, 5.0)

    def test_a_call_out_of_turn_is_refused_and_changes_nothing(self) -> None:
        scheduler = _C.UnitScheduler(1, [("a", [(1.0, 0, 0.0)], 2)], link=None, policy=POLICIES["lrtf"], seed=0)
        with pytest.raises(PlanError, match=r"device 0 runs no unit: call next\(\) first"):
            scheduler.finished(0)
        scheduler.next(0, 0.0)
        with pytest.raises(PlanError, match=r"device 0 runs a unit: call finished\(\) first"):
            scheduler.next(0, 0.0)
        with pytest.raises(PlanError, match="there is no device 1: give a number below 1"):
            scheduler.next(1, 0.0)
        with pytest.raises(PlanError, match="there is no job 1: give a number below 1"):
            scheduler.remaining(1)
        scheduler.finished(0)
        assert scheduler.units_left == 1


class TestHydrasCells:
    @pytest.mark.parametrize("equal", [True, False])
    @pytest.mark.parametrize(("models", "devices"), [(8, 4), (8, 8), (64, 4), (64, 8)])
    def test_the_longest_first_meet_the_bound(self, models: int, devices: int, equal: bool) -> None:
        schedule = simulate(cell(models, models=models, devices=devices, equal=equal))
        assert schedule.makespan <= 1.001 * schedule.bound

    def test_random_is_worse_on_few_different_models(self) -> None:
        over = {policy: list[float]() for policy in ("lrtf", "random", "shortest_first")}
        for seed in range(20):
            problem = cell(seed, models=8, devices=4, equal=False)
            for policy, found in over.items():
                schedule = simulate({**problem, "policy": policy}, seed=seed)
                found.append(schedule.makespan / schedule.bound)
        mean = {policy: statistics.fmean(found) for policy, found in over.items()}
        assert mean["random"] >= 1.05 * mean["lrtf"]
        assert mean["shortest_first"] >= 1.05 * mean["lrtf"]


class TestLoads:
    def test_one_device_is_never_faster_than_compute_or_loads(self) -> None:
        compute, loads = (
            simulate({**sharded(2, devices=1, microbatches=1, load=load), "policy": "lrtf_affinity"})
            for load in (0.25, 8.0)
        )
        # 2 models of 20 minibatches of 9 s, and one load before it.
        assert compute.bound == 2 * 20 * 9 + 0.25
        # Shards 0, 1, 2, 1, 0 of each minibatch, 0 once at the border of two; a unit of 1 s needs the last load.
        assert loads.bound == 8 * 2 * (20 * 4 + 1) + 1
        assert compute.makespan == compute.bound
        assert loads.makespan <= 1.001 * loads.bound

    @pytest.mark.parametrize(("devices", "models"), [(1, 4), (2, 4), (4, 8), (4, 6)])
    def test_staying_with_a_shard_hides_loads_where_alternating_waits(self, devices: int, models: int) -> None:
        problem = sharded(models, devices=devices, microbatches=4, load=3.0)
        found = {policy: simulate({**problem, "policy": policy}) for policy in POLICIES}
        stays = found.pop("lrtf_affinity")
        assert stays.makespan <= 1.04 * stays.bound
        assert stays.load_seconds <= 1.2 * 3.0 * models * (20 * 4 + 1)
        for schedule in found.values():
            assert schedule.makespan > 1.04 * stays.makespan

    def test_a_job_that_decides_the_end_does_not_wait_for_a_resident_shard(self) -> None:
        """Three jobs of one shard on two devices: without breaks two of them run first, and the third one alone."""
        jobs = [{"name": "a", "batches": 100, "units": [[1.0, 0, 0.1]]}] * 3
        schedule = simulate({"devices": 2, "jobs": jobs, "link": 1.0, "policy": "lrtf_affinity"})
        assert schedule.bound == 150.0
        assert schedule.makespan <= 152.0

    def test_seconds_add_up(self) -> None:
        for policy in POLICIES:
            schedule = simulate({**sharded(3, devices=1, microbatches=2, load=2.0), "policy": policy})
            assert schedule.busy_seconds == [pytest.approx(3 * 20 * 18)]
            assert schedule.makespan == pytest.approx(schedule.busy_seconds[0] + schedule.stalled_seconds)
            assert schedule.units == 3 * 20 * 12


class TestKnownDefects:
    @settings(deadline=None)
    @given(
        epochs=st.integers(1, 3), batches=st.integers(1, 4), seconds=st.lists(st.integers(1, 9), min_size=1, max_size=4)
    )
    def test_there_is_one_formula_of_what_remains(self, epochs: int, batches: int, seconds: list[int]) -> None:
        units = [(float(each), place, 0.0) for place, each in enumerate(seconds)]
        jobs = [("a", units, epochs * batches)]
        scheduler = _C.UnitScheduler(1, jobs, link=None, policy=POLICIES["lrtf"], seed=0)
        whole = sum(seconds)
        for epoch, batch, place in itertools.product(range(epochs), range(batches), range(len(seconds))):
            e, c, r = epochs - epoch, batches - batch, sum(seconds[place:])
            assert scheduler.remaining(0) == ((e - 1) * batches + c - 1) * whole + r
            scheduler.next(0, 0.0)
            scheduler.finished(0)
        assert scheduler.remaining(0) == 0

    def test_waits_for_loads_do_not_count_as_work(self) -> None:
        """The second job moves a hundred times the bytes, and has less compute: it is not the longer one."""
        jobs = [("a", [(3.0, 0, 1.0)], 2), ("b", [(2.0, 0, 100.0)], 2)]
        scheduler = _C.UnitScheduler(1, jobs, link=1.0, policy=POLICIES["lrtf"], seed=0)
        assert scheduler.remaining(0) == 6.0
        assert scheduler.remaining(1) == 4.0
        assert scheduler.next(0, 0.0) == (0, 0, 1.0, 4.0)


def test_a_plan_has_runs_of_units_without_a_wait() -> None:
    problem = {
        "devices": 1,
        "jobs": [{"name": "a", "epochs": 2, "batches": 2, "units": [[2.0, 0, 1.0], [2.0, 1, 3.0]]}],
        "link": 1.0,
    }
    # The second shard loads for 3 s while the first one runs for 2: a wait of 1 s. Back, the load of 1 s is hidden.
    found, makespan = checked(problem)
    assert found.plan == [
        [[0, 0, 0, 1.0], [0, 1, 2, 4.0], [0, 3, 4, 9.0], [0, 5, 6, 14.0], [0, 7, 7, 19.0]],
    ]
    assert makespan == 21.0


def test_the_judge_of_these_tests_sees_what_is_wrong() -> None:
    problem = {"devices": 2, "jobs": [{"name": "a", "unit_seconds": [2.0, 2.0]}, {"name": "b", "unit_seconds": [4.0]}]}
    good = [[[0, 0, 1, 0.0]], [[1, 0, 0, 0.0]]]
    assert judge(problem, good) == 4.0
    assert not idles_in_vain(problem, good)
    for bad in (
        [[[0, 0, 0, 0.0]], [[1, 0, 0, 0.0]]],  # a unit is missing
        [[[0, 0, 1, 0.0], [1, 0, 0, 3.0]], []],  # two at a time on a device
        [[[0, 0, 0, 0.0]], [[0, 1, 1, 1.0], [1, 0, 0, 3.0]]],  # two of a job
        [[[0, 1, 1, 0.0], [0, 0, 0, 2.0]], [[1, 0, 0, 0.0]]],  # out of order
        [[[0, 0, 1, 0.0], [0, 0, 0, 4.0]], [[1, 0, 0, 0.0]]],  # one runs twice
    ):
        with pytest.raises(ValueError, match=r"begins before|out of order"):
            judge(problem, bad)
    late = [[[0, 0, 1, 0.0]], [[1, 0, 0, 1.0]]]
    assert judge(problem, late) == 5.0
    assert idles_in_vain(problem, late)


def test_no_jobs_take_no_time() -> None:
    assert solve("units", {"devices": 2, "jobs": []}) == Solution(objective=0.0, plan=[[], []], bound=0.0)


def with_job(**entries: Any) -> Problem:
    return {"devices": 1, "jobs": [{"name": "wide", **entries}]}


GOOD = with_job(units=[[1.0, 0, 1.0]])


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("problem", "text"),
    [
        ({**GOOD, "devices": 5000}, "5000 devices: give a number from 1 to 4096"),
        ({**GOOD, "policy": "longest"}, r"problem\['policy'\] is 'longest': give one of lrtf, "),
        ({**GOOD, "policy": 1}, "give a text"),
        ({**GOOD, "link": 0.0}, "give a number above 0"),
        ({**GOOD, "link": 1e-320}, "give smaller numbers"),
        (with_job(), "has no 'units': add it"),
        (with_job(units=[]), "job 'wide' has no units: give at least one"),
        (with_job(units=[[1.0]]), r"jobs\[0\]\['units'\]\[0\] has 1 entries: give \[seconds, shard\] or"),
        (with_job(units=[[1.0, 0, 0.0, 0.0]]), "has 4 entries"),
        (with_job(units=[[1.0, 0.5]]), "give a whole number"),
        (with_job(units=[[-1.0, 0]]), "finite number of at least 0"),
        (with_job(unit_seconds=[1.0], epochs=0), "give a whole number from 1"),
        (with_job(unit_seconds=[1.0], batches=10**8 + 1), "job 'wide' has 1 units 100000001 times, and there is room"),
        (with_job(unit_seconds=[1e308], batches=2), "give smaller numbers"),
    ],
)
def test_senseless_problems_are_refused(problem: Problem, text: str) -> None:
    solve("units", GOOD)
    with pytest.raises(PlanError, match=text):
        solve("units", problem)
