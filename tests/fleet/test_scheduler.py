"""The fleet's scheduler in virtual time: its cluster asserts that no device ever has two gangs, and no job either."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_ext.errors import StateError
from hydra_ext.fleet.scheduling.planning import (
    Choice,
    FleetPlan,
    Placed,
    Work,
    arranged,
    lower_bound,
    make_plan,
)
from hydra_ext.fleet.scheduling.records import JobState
from hydra_ext.fleet.scheduling.scheduler import MOST_FAILURES
from support.fleet.virtual_cluster import Fault, Speed, Trouble
from support.fleet.virtual_fleet import Curve, VirtualFleet, once

NODES = [{"a": 4}, {"a": 2, "b": 4}, {"a": 1, "b": 1, "c": 2}, {"a": 8}]
ALONE: Curve = {1: 1000.0}
SCALES: Curve = {1: 1000.0, 2: 500.0, 4: 250.0}


def curve(rng: random.Random, most: int) -> Curve:
    """Work of which a part cannot be spread."""
    work, part = rng.uniform(1000.0, 20_000.0), rng.uniform(0.02, 0.5)
    return {count: work * (part + (1 - part) / count) for count in (1, 2, 4, 8) if count <= most}


def batch(seed: int) -> tuple[Mapping[str, int], dict[str, Curve]]:
    rng = random.Random(seed)
    nodes = rng.choice(NODES)
    return nodes, {f"job{i}": curve(rng, max(nodes.values())) for i in range(rng.randint(3, 5))}


def has_ended(fleet: VirtualFleet, *, but: Sequence[str] = ()) -> None:
    for name, record in fleet.records.items():
        assert record.state is (JobState.SET_ASIDE if name in but else JobState.DONE)
        assert fleet.cluster.saved.get(name, 0) == fleet.steps or name in but


# ---- what may happen ------------------------------------------------------------------------------------------------
faults = st.builds(
    Fault,
    job=st.sampled_from(["job0", "job1", "job2"]),
    step=st.integers(0, 9999),
    trouble=st.sampled_from(Trouble),
    times=st.integers(1, 2),
)
happenings = st.lists(
    st.tuples(st.floats(0, 20_000), st.sampled_from(["kill", "lose", "come"]), st.integers(1, 4)), max_size=5
)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 30),
    troubles=st.lists(faults, max_size=4),
    script=happenings,
    cost=st.sampled_from([0, 30]),
    parts=st.dictionaries(st.sampled_from(["job0", "job1", "job2"]), st.floats(0, 1)),
)
def test_all_jobs_end_whatever_happens(
    seed: int, troubles: list[Fault], script: list[tuple[float, str, int]], cost: int, parts: dict[str, float]
) -> None:
    nodes, jobs = batch(seed)
    copies = [Fault(each.job, each.step, each.trouble, each.times) for each in troubles]
    loads = {name: {"link": part, "compute": 1 - part} for name, part in parts.items()}
    fleet = VirtualFleet(nodes, jobs, open=cost, save=cost, interval=3000.0, faults=copies, loads=loads)
    for number, (moment, happening, devices) in enumerate(script):
        if happening == "kill":
            fleet.cluster.at(moment, lambda: fleet.cluster.kill_job("job0"))
        elif happening == "come":
            fleet.cluster.at(moment, lambda name=f"new{number}", n=devices: fleet.cluster.come(name, n))  # type: ignore[misc]
    if len(nodes) > 1 and any(happening == "lose" for _, happening, _ in script):
        fleet.cluster.at(script[0][0], lambda: fleet.cluster.lose("a"))
    fleet.run()
    has_ended(fleet, but=[name for name, record in fleet.records.items() if record.state is JobState.SET_ASIDE])
    assert all(len(r.failures) == MOST_FAILURES for r in fleet.records.values() if r.state is JobState.SET_ASIDE)


LINK, COMPUTE = {"link": 0.95, "compute": 0.05}, {"link": 0.05, "compute": 0.95}


def test_jobs_share_devices_where_all_end_earlier_by_that() -> None:
    loads = {"a": LINK, "b": COMPUTE, "c": LINK, "d": COMPUTE}
    fleet = VirtualFleet({"n": 2}, dict.fromkeys(loads, ALONE), loads=loads)
    assert fleet.run() == pytest.approx(1000)
    devices = {name: fleet.stretches(name)[0].devices for name in loads}
    for one, other in (("a", "c"), ("b", "d")):  # each has the device of one with the other bottleneck
        assert devices[one] != devices[other]
    enough = VirtualFleet({"n": 4}, dict.fromkeys(loads, ALONE), loads=loads)
    assert enough.run() == pytest.approx(1000)
    assert {stretch.technique for stretch in enough.cluster.stretches} == {"on 1"}


def test_a_longer_job_goes_on_alone_and_the_others_come_behind_it() -> None:
    """What is left of a pack is a job like others: it may move, and its device is free behind it."""
    loads = {"a": LINK, "b": COMPUTE}
    fleet = VirtualFleet({"n": 1}, {"a": {1: 500.0}, "b": {1: 2000.0}, "c": {1: 100.0}}, loads=loads)
    assert fleet.run() == pytest.approx(2100)
    assert [stretch.end for stretch in fleet.stretches("a")] == [pytest.approx(500)]


def test_what_is_left_of_a_pack_is_planned_without_the_slowdown() -> None:
    """Both compute for three quarters of a step: together a step takes half as long again."""
    loads = {name: {"compute": 0.75} for name in "ab"}
    fleet = VirtualFleet(
        {"n": 1},
        {"a": {1: 500.0}, "b": {1: 2000.0}},
        loads=loads,
        errors=lambda job, technique, devices: 1.5 if technique == "shared" else 1.0,
    )
    begun: list[float] = []
    fleet.cluster.at(0.01, lambda: begun.extend(record.seconds[1] for record in fleet.records.values()))
    fleet.run()
    assert begun == pytest.approx([0.075, 0.3])
    first, second = fleet.events("plan")[:2]
    assert first["jobs"]["a"][3] == pytest.approx(750)
    assert first["jobs"]["b"][3] == pytest.approx(2250)
    assert second["at"] == pytest.approx(750)
    option, _, _, end = second["jobs"]["b"]
    assert (option, end) == (1, pytest.approx(1500, rel=1e-3))


def test_the_seconds_of_a_pack_that_was_killed_are_those_of_its_jobs_alone_again() -> None:
    loads = {name: {"compute": 0.75} for name in "ab"}
    fleet = VirtualFleet(
        {"n": 1},
        dict.fromkeys("ab", ALONE),
        loads=loads,
        errors=lambda job, technique, devices: 1.5 if technique == "shared" else 1.0,
    )
    fleet.cluster.at(450.0, lambda: fleet.cluster.kill_job("a"))
    seen: list[float] = []
    fleet.cluster.at(450.05, lambda: seen.extend(record.seconds[1] for record in fleet.records.values()))
    fleet.run()
    assert seen == pytest.approx([0.1, 0.1])


def test_the_jobs_of_a_process_that_was_killed_begin_alone() -> None:
    loads = {"a": LINK, "b": COMPUTE}
    fleet = VirtualFleet({"n": 1}, dict.fromkeys(loads, ALONE), loads=loads, interval=100.0)
    fleet.cluster.at(450.0, lambda: fleet.cluster.kill_job("a"))
    fleet.run()
    has_ended(fleet)
    firsts, others = zip(*(fleet.stretches(name) for name in loads), strict=True)
    assert {(stretch.start, stretch.end) for stretch in firsts} == {(0.0, 450.0)}
    assert others[0].end <= others[1].start or others[1].end <= others[0].start


def test_a_hanging_job_ends_the_one_beside_it_and_neither_is_set_aside() -> None:
    loads = {"a": LINK, "b": COMPUTE}
    hangs = Fault("a", 5000, Trouble.HANGS)
    fleet = VirtualFleet({"n": 1}, dict.fromkeys(loads, ALONE), loads=loads, faults=[hangs], patience=50.0)
    fleet.run()
    has_ended(fleet)
    assert {name: len(fleet.stretches(name)) for name in loads} == {"a": 2, "b": 2}


def test_a_job_that_always_raises_is_set_aside_with_its_error_and_the_others_go_on() -> None:
    jobs = {"bad": ALONE, "good": ALONE, "better": ALONE}
    fleet = VirtualFleet({"a": 1}, jobs, faults=[Fault("bad", 70, Trouble.RAISES, times=100)])
    fleet.run()
    has_ended(fleet, but=["bad"])
    assert len(fleet.stretches("bad")) == MOST_FAILURES
    assert fleet.events("set aside") == [
        {
            "event": "set aside",
            "job": "bad",
            "failures": ["ValueError: step 70 of bad"] * 3,
            "trace": "Traceback\nValueError: step 70 of bad",
        }
    ]


def test_failures_with_checkpoints_in_between_do_not_set_a_job_aside() -> None:
    troubles = [Fault("job", step, Trouble.RAISES) for step in range(1500, 10_000, 1500)]
    fleet = VirtualFleet({"a": 1}, {"job": ALONE}, interval=100.0, faults=troubles)
    fleet.run()
    has_ended(fleet)
    assert len(fleet.stretches("job")) == 7


def test_a_job_that_ends_without_a_word_has_failed() -> None:
    fleet = VirtualFleet({"a": 1}, {"job": ALONE}, faults=[Fault("job", 5, Trouble.ENDS, times=100)])
    fleet.run()
    assert fleet.records["job"].state is JobState.SET_ASIDE
    assert fleet.records["job"].failures == ["it ended before its last step, and was not asked to"] * 3


def test_a_hanging_job_is_killed_after_its_patience_and_restarted() -> None:
    fleet = VirtualFleet({"a": 2}, {"job": ALONE, "other": ALONE}, open=20.0, interval=300.0, patience=100.0)
    fleet.cluster.faults = [Fault("job", 5000, Trouble.HANGS)]
    fleet.run()
    has_ended(fleet)
    first, second = fleet.stretches("job")
    # It opens for 20 s, saves after 300 and makes step 5000 after 500; then it is silent for 100 s.
    assert first.end == pytest.approx(20 + 500 + 100)
    assert (second.start, second.first) == (first.end, pytest.approx(3000, abs=1))
    assert fleet.events("end")[0]["failure"] == "it made no step for 100 s"
    assert len(fleet.stretches("other")) == 1


def test_a_job_that_opens_slowly_does_not_hang() -> None:
    fleet = VirtualFleet({"a": 1}, {"job": ALONE}, open=500.0, patience=100.0)
    assert fleet.run() == pytest.approx(1500.0)
    assert len(fleet.stretches("job")) == 1


def test_a_job_whose_gang_is_killed_goes_on_elsewhere_from_its_last_checkpoint() -> None:
    fleet = VirtualFleet({"a": 3}, {"job": ALONE, "other": ALONE}, interval=300.0)
    fleet.cluster.at(450.0, lambda: fleet.cluster.kill_job("job"))
    assert fleet.run() == pytest.approx(1150.0, abs=1)
    has_ended(fleet)
    first, second = fleet.stretches("job")
    assert first.first == 0
    assert first.last == pytest.approx(4500, abs=1)
    assert second.first == pytest.approx(3000, abs=1)
    assert second.devices == (2,)
    assert first.devices != second.devices
    [plan] = [entry for entry in fleet.events("plan") if entry["at"] == 450.0]
    assert plan["makespan"] == pytest.approx(700, abs=1)


def test_the_jobs_of_a_lost_node_go_on_on_the_others() -> None:
    jobs = {f"job{i}": {2: 1000.0} for i in range(3)}
    fleet = VirtualFleet({"a": 2, "b": 4}, jobs, interval=300.0)
    fleet.cluster.at(500.0, lambda: fleet.cluster.lose("b"))
    fleet.run()
    has_ended(fleet)
    assert {stretch.node for stretch in fleet.cluster.stretches if stretch.start >= 500.0} == {"a"}
    # What was saved before the loss is not lost, and the third job waits for a device.
    assert fleet.cluster.now() == pytest.approx(1000 + 2 * 700, abs=1)


def test_a_new_node_is_used() -> None:
    fleet = VirtualFleet({"a": 1}, {"job": ALONE, "other": ALONE})
    fleet.cluster.at(500.0, lambda: fleet.cluster.come("b", 1))
    assert fleet.run() == pytest.approx(1500.0)
    assert fleet.stretches("other")[0].node == "b"


def test_nodes_that_go_away_do_not_set_a_job_aside() -> None:
    fleet = VirtualFleet({"node0": 1, "last": 1}, {"job": ALONE, "other": ALONE}, interval=1e6)
    for number in range(8):
        fleet.cluster.at(number * 90.0 + 10.0, lambda name=f"node{number}": fleet.cluster.lose(name))  # type: ignore[misc]
        fleet.cluster.at(number * 90.0 + 20.0, lambda name=f"node{number + 1}": fleet.cluster.come(name, 1))  # type: ignore[misc]
    fleet.run()
    has_ended(fleet)
    assert len(fleet.cluster.stretches) == 10


def test_a_technique_that_will_not_do_a_job_is_not_taken_again_and_is_no_failure() -> None:
    curves = {"job": {1: 1000.0, 2: 900.0, 3: 800.0, 4: 700.0, 5: 600.0}}
    troubles = [Fault("job", 9, Trouble.WONT_DO, technique=f"on {devices}") for devices in (2, 3, 4, 5)]
    fleet = VirtualFleet({"a": 5}, curves, faults=troubles)
    fleet.run()
    has_ended(fleet)
    assert [len(stretch.devices) for stretch in fleet.stretches("job")] == [5, 4, 3, 2, 1]


def test_jobs_that_no_node_can_hold_any_more_are_told_when_all_others_have_ended() -> None:
    fleet = VirtualFleet({"a": 2, "b": 1}, {"large": {2: 1000.0}, "small": ALONE, "last": ALONE})
    fleet.cluster.at(100.0, lambda: fleet.cluster.lose("a"))
    with pytest.raises(StateError, match=r"job 'large' needs 2 devices of one node, and the largest .* has 1"):
        fleet.run()
    assert {name for name, each in fleet.records.items() if each.state is JobState.DONE} == {"small", "last"}
    assert not list(fleet.cluster.running())


def test_a_job_that_waits_does_not_take_the_devices_that_one_moves_to() -> None:
    def planner(works: Sequence[Work], nodes: Mapping[str, int], *, seed: int, before: FleetPlan | None) -> FleetPlan:
        """When the first job has ended, the second one is to have its devices, too."""
        option = {"moves": int(seed > 0)}
        order = {"first": 0.0, "moves": 0.0, "waits": 9.0}
        chosen = {
            work.name: Placed(option=option.get(work.name, 0), node="a", start=order[work.name], end=9.0)
            for work in works
        }
        return arranged(works, nodes, chosen)

    jobs: dict[str, Curve] = {"first": {2: 1000.0}, "moves": {2: 2000.0, 4: 1000.0}, "waits": {2: 1000.0}}
    fleet = VirtualFleet({"a": 4}, jobs, save=10.0, interval=1e6, planner=planner)
    fleet.cluster.speeds = lambda job, technique, devices: Speed(0.01 if job == "first" else 0.1, save=10.0)
    fleet.run()
    has_ended(fleet)
    before, behind = fleet.stretches("moves")
    assert (len(before.devices), len(behind.devices)) == (2, 4)
    assert behind.start == before.end == pytest.approx(120, abs=1)  # it saves for 10 s, as the first job has
    assert fleet.stretches("waits")[0].start == behind.end


def test_the_end_of_the_last_gang_is_waited_for() -> None:
    fleet = VirtualFleet({"a": 1}, {"job": ALONE, "other": ALONE})
    fleet.cluster.speeds = lambda job, technique, devices: Speed(0.1, exit=7.0)
    assert fleet.run() == pytest.approx(2014.0)
    assert [entry["failure"] for entry in fleet.events("end")] == [None, None]


# ---- introspection --------------------------------------------------------------------------------------------------
def both(
    seed: int, *, cost: float = 0.0, error: float = 0.0, troubles: Sequence[Fault] = ()
) -> tuple[float, VirtualFleet]:
    """Seconds of the plan made at the beginning, and the fleet that has planned again and again."""
    nodes, jobs = batch(seed)

    def errors(job: str, technique: str, devices: int) -> float:
        return 1 + error * random.Random(f"{seed} {job} {devices}").uniform(-1, 1)

    def make(planner: object) -> VirtualFleet:
        copies = [Fault(each.job, each.step, each.trouble, each.times) for each in troubles]
        costs = {"open": cost / 2, "save": cost / 2}
        return VirtualFleet(
            nodes,
            jobs,
            steps=1_000_000,
            interval=2000.0,
            errors=errors,
            faults=copies,
            planner=planner,
            **costs,  # type: ignore[arg-type]
        )

    fleet = make(make_plan)
    fleet.run()
    return make(once).run(), fleet


@pytest.mark.cases(6)
@pytest.mark.parametrize("seed", range(30))
def test_with_exact_estimates_and_free_moves_it_is_never_later_than_its_first_plan(seed: int) -> None:
    at_once, fleet = both(seed)
    assert fleet.cluster.now() <= at_once * (1 + 1e-6)
    works = [
        Work(name=name, choices=[Choice(devices=devices, seconds=seconds) for devices, seconds in curve.items()])
        for name, curve in fleet.jobs.items()
    ]
    assert fleet.cluster.now() >= lower_bound(works, fleet.sizes) * (1 - 1e-6)  # which holds for moves, too


@pytest.mark.cases(4)
@pytest.mark.parametrize("cost", [20.0, 400.0])
@pytest.mark.parametrize("seed", range(30, 45))
def test_with_moves_that_cost_it_is_never_later_by_more_than_they_cost(seed: int, cost: float) -> None:
    at_once, fleet = both(seed, cost=cost)
    assert fleet.cluster.now() <= at_once * (1 + 1e-6) + fleet.moves * cost


def test_with_wrong_estimates_it_is_no_later_on_average() -> None:
    pairs = [both(seed, cost=30.0, error=0.2) for seed in range(50, 62)]
    assert sum(fleet.moves for _, fleet in pairs) > 0
    assert sum(fleet.cluster.now() / at_once for at_once, fleet in pairs) <= len(pairs)


def test_with_early_deaths_it_is_no_later_on_average() -> None:
    troubles = [Fault("job0", 300_000, Trouble.RAISES, times=100), Fault("job1", 0, Trouble.RAISES, times=100)]
    pairs = [both(seed, cost=30.0, troubles=troubles) for seed in range(70, 80)]
    assert sum(fleet.cluster.now() / at_once for at_once, fleet in pairs) <= len(pairs)


@pytest.mark.every_case
@pytest.mark.parametrize(("cost", "moves"), [(10.0, 1), (200.0, 0)])
def test_a_plan_is_adopted_only_if_it_gains_more_than_saving_and_opening_cost(cost: float, moves: int) -> None:
    # When the short job ends, after 600 s, the long one has 400 s left, or 240 on two devices: a gain of 160.
    jobs: dict[str, Curve] = {"short": {1: 600.0}, "long": {1: 1000.0, 2: 600.0}}
    fleet = VirtualFleet({"a": 2}, jobs, open=cost / 2, save=cost / 2, interval=1e6)
    fleet.run()
    assert fleet.moves == moves
    assert fleet.cluster.now() == pytest.approx(1000 + cost - moves * (160 - cost), abs=3)


# ---- plans ----------------------------------------------------------------------------------------------------------
def test_plans_that_take_long_are_made_less_often() -> None:
    def slow(works: Sequence[Work], nodes: Mapping[str, int], *, seed: int, before: FleetPlan | None) -> FleetPlan:
        fleet.cluster.pass_time(10.0)
        return make_plan(works, nodes, seed=seed, before=before)

    jobs = {f"job{i}": {1: 100.0 + 7 * i} for i in range(12)}
    fleet = VirtualFleet({"a": 2}, jobs, planner=slow, interval=1.0)
    seconds = fleet.run()
    has_ended(fleet)
    assert 3 <= fleet.scheduler.plans <= 1 + seconds / 210


def test_a_plan_that_holds_is_not_made_again() -> None:
    jobs = {f"job{i}": ALONE for i in range(12)}
    fleet = VirtualFleet({"a": 2}, jobs, interval=1e6)
    assert fleet.run() == pytest.approx(6000.0)
    assert fleet.scheduler.plans <= 2  # at the beginning, and when nothing waits any more


def test_what_is_seen_of_a_step_replaces_what_the_trial_has_said() -> None:
    fleet = VirtualFleet({"a": 1}, {"job": ALONE}, errors=lambda *_: 1.5, interval=100.0)
    fleet.run()
    assert fleet.records["job"].seconds == [pytest.approx(0.15)]
    plan = fleet.events("plan")[1]
    assert plan["at"] + plan["makespan"] == pytest.approx(1500.0, rel=0.01)
