"""Plans of a fleet while jobs run, against an evaluator, a search over all times, and exhaustive search."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_ext.fleet.scheduling import planning
from hydra_ext.fleet.scheduling.planning import (
    Choice,
    FleetPlan,
    Held,
    Placed,
    Work,
    arranged,
    follow_plan,
    lower_bound,
    make_plan,
)
from hydra_ext.plan import Solution
from support.plan.jobs import shortest, small_problem

Nodes = dict[str, int]
CLOSE = 1e-9

sizes = st.dictionaries(st.sampled_from("abc"), st.integers(1, 4), min_size=1, max_size=3)
times = st.integers(1, 20).map(float)


@st.composite
def states(draw: st.DrawFn, most: int = 5) -> tuple[Nodes, list[Work]]:
    """Nodes, and jobs of which some run or stop: their gangs have devices of their own."""
    nodes = draw(sizes)
    free, works = dict(nodes), []
    for number in range(draw(st.integers(1, most))):
        counts = draw(st.lists(st.integers(1, max(nodes.values())), min_size=1, max_size=3))
        choices = [Choice(devices=devices, seconds=draw(times)) for devices in counts]
        node, option = draw(st.sampled_from(sorted(nodes))), draw(st.integers(0, len(counts) - 1))
        held = None
        if draw(st.booleans()) and free[node] >= counts[option]:
            free[node] -= counts[option]
            leave = float(draw(st.integers(0, 4)))
            stops = draw(st.integers(0, 3)) == 0
            held = Held(node=node, devices=counts[option], option=None if stops else option, leave=leave)
        works.append(Work(name=f"job{number}", choices=choices, held=held))
    return nodes, works


@st.composite
def choices_for(draw: st.DrawFn, works: Sequence[Work], nodes: Nodes) -> dict[str, Placed]:
    """Any options that fit a node, any nodes, any order."""
    chosen = {}
    for work in works:
        option = draw(st.integers(0, len(work.choices) - 1))
        start = float(draw(st.integers(0, 9)))
        node = draw(st.sampled_from([*sorted(nodes), "gone"]))
        chosen[work.name] = Placed(option=option, node=node, start=start, end=start)
    return chosen


def judge(plan: FleetPlan, works: Sequence[Work], nodes: Mapping[str, int]) -> None:
    """All jobs are there, on devices that the node has, and those that run go on or leave first."""
    assert plan.jobs.keys() == {work.name for work in works}
    taken = []
    for work in works:
        placed = plan.jobs[work.name]
        choice = work.choices[placed.option]
        assert abs(placed.end - placed.start - choice.seconds) <= CLOSE * placed.end
        taken.append((placed.node, placed.start, placed.end, choice.devices))
        if work.held is not None and placed.option == work.held.option:
            assert (placed.node, placed.start) == (work.held.node, 0.0)
        elif work.held is not None:
            assert placed.start >= work.held.leave
            taken.append((work.held.node, 0.0, work.held.leave, work.held.devices))
    for _, moment, _, _ in taken:
        for node, devices in nodes.items():
            used = [count for where, start, end, count in taken if where == node and start <= moment < end]
            assert sum(used) <= devices, f"{sum(used)} of {devices} devices of {node} at {moment}"
    assert plan.makespan == max((placed.end for placed in plan.jobs.values()), default=0.0)


@given(data=st.data(), state=states(), keeps=st.booleans())
def test_arranged_jobs_never_use_more_devices_than_a_node_has(
    data: st.DataObject, state: tuple[Nodes, list[Work]], keeps: bool
) -> None:
    nodes, works = state
    chosen = data.draw(choices_for(works, nodes))
    plan = arranged(works, nodes, chosen, keeps_nodes=keeps)
    judge(plan, works, nodes)
    for work in works:
        assert plan.jobs[work.name].option == chosen[work.name].option


@given(data=st.data(), state=states())
def test_jobs_that_are_shorter_than_planned_start_no_later(
    data: st.DataObject, state: tuple[Nodes, list[Work]]
) -> None:
    nodes, works = state
    waiting = [replace(work, held=None) for work in works]
    plan = arranged(waiting, nodes, data.draw(choices_for(waiting, nodes)))
    shorter = [
        replace(work, choices=[replace(each, seconds=each.seconds * data.draw(st.floats(0.1, 1.0)))] * 3)
        for work in waiting
        for each in [work.choices[plan.jobs[work.name].option]]
    ]
    found = arranged(shorter, nodes, plan.jobs)
    for name, placed in plan.jobs.items():
        assert found.jobs[name].start <= placed.start


@given(
    taken=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6), st.integers(1, 4)), max_size=8),
    asked=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(0, 12)), min_size=1, max_size=4),
)
def test_the_earliest_time_is_that_of_a_search_over_all_times(
    taken: list[tuple[int, int, int]], asked: list[tuple[int, int, int]]
) -> None:
    profile, used = planning._Profile(4), [0] * 100
    for start, seconds, devices in taken:
        if all(count + devices <= 4 for count in used[start : start + seconds]):
            profile.take(float(start), float(start + seconds), devices)
            used[start : start + seconds] = [count + devices for count in used[start : start + seconds]]
    for devices, seconds, after in asked:
        expected = next(
            time for time in range(after, 100) if all(n + devices <= 4 for n in used[time : time + seconds])
        )
        assert profile.earliest(devices, float(seconds), float(after)) == expected


@settings(max_examples=30, deadline=None)
@given(data=st.data(), state=states())
def test_a_plan_is_never_worse_than_following_the_one_before(
    data: st.DataObject, state: tuple[Nodes, list[Work]]
) -> None:
    nodes, works = state
    before = arranged(works, nodes, data.draw(choices_for(works, nodes)))
    plan = make_plan(works, nodes, seed=0, before=before)
    judge(plan, works, nodes)
    assert plan.bound is not None
    assert lower_bound(works, nodes) <= plan.bound <= plan.makespan * (1 + CLOSE)
    followed = follow_plan(works, nodes, before)
    assert followed is not None
    assert plan.makespan <= followed.makespan


@settings(max_examples=30, deadline=None)
@given(state=states())
def test_jobs_move_only_if_the_plan_gains_more_than_a_hundredth(state: tuple[Nodes, list[Work]]) -> None:
    nodes, works = state
    plan = make_plan(works, nodes, seed=0, before=None)
    options = {work.name: work.option for work in works if work.option is not None}
    moved = [name for name, option in options.items() if plan.jobs[name].option != option]
    if moved:
        stay = {name: replace(each, option=options.get(name, each.option)) for name, each in plan.jobs.items()}
        assert plan.makespan < 0.99 * arranged(works, nodes, stay).makespan


@pytest.mark.cases(20)
@pytest.mark.parametrize("seed", range(60))
def test_a_few_waiting_jobs_are_planned_as_exhaustive_search_does(seed: int) -> None:
    problem = small_problem(seed)
    nodes = {f"node{number}": devices for number, devices in enumerate(problem["nodes"])}
    works = [
        Work(
            name=job["name"],
            choices=[Choice(devices=each["gpus"], seconds=each["runtime_s"]) for each in job["options"]],
        )
        for job in problem["jobs"]
    ]
    plan = make_plan(works, nodes, seed=seed, before=None)
    judge(plan, works, nodes)
    assert plan.makespan == shortest(problem) == plan.bound


def one_running(*, on_two: float, leave: float) -> FleetPlan:
    """A job has 1000 s left on one of two devices."""
    choices = [Choice(devices=1, seconds=1000.0), Choice(devices=2, seconds=on_two)]
    held = Held(node="a", devices=1, option=0, leave=leave)
    return make_plan([Work(name="job", choices=choices, held=held)], {"a": 2}, seed=0, before=None)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("on_two", "leave", "moves"),
    [(989.0, 0.0, True), (991.0, 0.0, False), (500.0, 485.0, True), (500.0, 495.0, False), (1500.0, 0.0, False)],
)
def test_what_a_move_costs_counts(on_two: float, leave: float, moves: bool) -> None:
    placed = one_running(on_two=on_two, leave=leave).jobs["job"]
    assert placed.option == int(moves)
    assert placed.end == (leave + on_two if moves else 1000.0)


def test_the_devices_of_a_job_that_moves_are_free_when_it_has_saved() -> None:
    # It leaves the whole node after 7 s; then both run side by side.
    runs = Work(
        name="runs",
        choices=[Choice(devices=4, seconds=90.0), Choice(devices=2, seconds=100.0)],
        held=Held(node="a", devices=4, option=0, leave=7.0),
    )
    waits = Work(name="waits", choices=[Choice(devices=2, seconds=100.0)])
    plan = make_plan([runs, waits], {"a": 4}, seed=0, before=None)
    assert plan.jobs["runs"].option == 1
    assert {placed.start for placed in plan.jobs.values()} == {7.0}


def test_a_small_job_leaves_the_large_node_to_the_job_that_needs_it() -> None:
    small = Work(name="a small one", choices=[Choice(devices=1, seconds=10.0)])
    large = Work(name="large", choices=[Choice(devices=4, seconds=10.0)])
    assert make_plan([small, large], {"large": 4, "small": 2}, seed=0, before=None).makespan == 10.0


def test_only_the_moves_that_gain_something_are_made() -> None:
    # The long job gains from the second device; so would the short one, but nothing ends sooner for it.
    works = [
        Work(
            name=name,
            choices=[Choice(devices=1, seconds=seconds), Choice(devices=2, seconds=seconds / 2)],
            held=Held(node=node, devices=1, option=0),
        )
        for name, node, seconds in (("long", "a", 100.0), ("short", "b", 30.0))
    ]
    nodes = {"a": 2, "b": 2}
    both = arranged(
        works, nodes, {work.name: Placed(option=1, node="ab"[i], start=0.0, end=0.0) for i, work in enumerate(works)}
    )
    for plan in (planning._with_fewer_moves(both, works, nodes), make_plan(works, nodes, seed=0, before=None)):
        assert {name: placed.option for name, placed in plan.jobs.items()} == {"long": 1, "short": 0}


Problem = dict[str, Any]


def found_by(rule: Callable[[Problem], list[int]], seen: list[Problem]) -> Callable[..., Solution]:
    """A solver that chooses options by a rule, and has all jobs one behind the other."""

    def solve(kind: str, problem: Problem, *, seed: int) -> Solution:
        seen.append(problem)
        plan = [[option, 0, float(start)] for start, option in enumerate(rule(problem))]
        return Solution(objective=None, plan=plan, bound=0.0)

    return solve


def test_the_plan_that_is_followed_stays_if_the_search_finds_less(monkeypatch: pytest.MonkeyPatch) -> None:
    works = [
        Work(name=f"job{i}", choices=[Choice(devices=1, seconds=100.0), Choice(devices=2, seconds=80.0)])
        for i in range(3)
    ]
    before = make_plan(works, {"a": 2}, seed=0, before=None)
    monkeypatch.setattr(planning, "solve", found_by(lambda problem: [1, 1, 1], []))
    assert make_plan(works, {"a": 2}, seed=0, before=None).makespan == 240.0
    assert make_plan(works, {"a": 2}, seed=0, before=before).makespan == before.makespan == 180.0


def test_what_a_plan_with_moves_gains_without_them_is_no_reason_to_move(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Work(
        name="runs",
        choices=[Choice(devices=1, seconds=100.0), Choice(devices=1, seconds=90.0)],
        held=Held(node="a", devices=1, option=0, leave=9.0),
    )
    waits = [
        Work(name=f"waits{i}", choices=[Choice(devices=1, seconds=50.0), Choice(devices=1, seconds=70.0)])
        for i in range(3)
    ]
    seen: list[Problem] = []
    # Where the running job has one option, the search takes the slow ones of the others.
    rule = found_by(lambda problem: [0, 1, 1, 1] if len(problem["jobs"][0]["options"]) == 1 else [1, 0, 0, 0], seen)
    monkeypatch.setattr(planning, "solve", rule)
    monkeypatch.setattr(planning, "_CHANGES", 0)
    monkeypatch.setattr(planning, "_with_fewer_moves", lambda plan, works, nodes: plan)
    plan = make_plan([runs, *waits], {"a": 2}, seed=0, before=None)
    assert [placed.option for placed in plan.jobs.values()] == [0, 0, 0, 0]
    assert plan.makespan == 150.0
    assert [option["runtime_s"] for option in seen[1]["jobs"][0]["options"]] == [100.0, 99.0]


def test_a_plan_cannot_be_followed_without_its_jobs_and_nodes() -> None:
    work = Work(name="job", choices=[Choice(devices=2, seconds=10.0)])
    before = arranged([work], {"a": 2}, {"job": Placed(option=0, node="a", start=0.0, end=10.0)})
    assert follow_plan([work], {"a": 2}, before) == before
    assert follow_plan([work], {"a": 1, "b": 2}, before) is None
    assert follow_plan([work, replace(work, name="new")], {"a": 2}, before) is None
    assert make_plan([work], {"b": 2}, seed=0, before=before).jobs["job"].node == "b"


def test_a_plan_near_the_bound_is_followed_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    works = [Work(name=f"job{number}", choices=[Choice(devices=1, seconds=100.0)]) for number in range(4)]
    nodes = {"a": 2}
    before = make_plan(works, nodes, seed=0, before=None)
    monkeypatch.setattr(planning, "solve", None)
    assert make_plan(works, nodes, seed=1, before=before) == before


def test_equal_seeds_have_equal_plans() -> None:
    nodes = {"a": 4, "b": 2}
    works = [
        Work(name=f"job{i}", choices=[Choice(devices=n, seconds=100.0 * (i + 1) / n + 9 * i) for n in (1, 2, 4)])
        for i in range(6)
    ]
    works[0] = replace(works[0], held=Held(node="a", devices=1, option=0, leave=3.0))
    assert make_plan(works, nodes, seed=4, before=None) == make_plan(works, nodes, seed=4, before=None)
