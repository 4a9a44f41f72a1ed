"""Jobs that share a device: which do by the planner's choice, and that none is disturbed by another one's mishap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hydra_ext
from hydra_ext.fleet import Fleet, Guide, Job, Outcome, Results, history
from hydra_ext.fleet.cluster.training import loads_of
from hydra_ext.fleet.results import Stretch
from hydra_ext.fleet.scheduling import packing
from hydra_ext.fleet.scheduling.packing import Pack, ends, gathered, paired, slowdowns, together
from hydra_ext.fleet.scheduling.records import JobRecord, JobState, Running
from hydra_ext.fleet.scheduling.trials import Option, SharingOption
from hydra_ext.runtime.placement.sharing import TenantFigures
from support.fleet import drives, trainings
from support.fleet.comparison import assert_as_alone
from support.fleet.drives import driven, events, wait_for

BUDGET = "512KiB"


def meet(one: Stretch, other: Stretch) -> bool:
    """Whether two stretches have a device at the same time."""
    same = one.node == other.node and set(one.devices) & set(other.devices)
    return bool(same) and one.start < other.end and other.start < one.end


def companions(results: Results, name: str) -> list[set[str]]:
    """The jobs that were beside a job on its device, for each of its stretches."""
    return [
        {other.name for other in results.values() for each in other.stretches if other.name != name and meet(own, each)}
        for own in results[name].stretches
    ]


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs share their device, whatever was measured."""
    monkeypatch.setattr(packing, "slowdowns", lambda options: [1.0] * len(options))


def shared(folder: Path, jobs: Sequence[Job], **options: Any) -> Results:
    """On one device, where jobs run in no other way. Their numbers are compared at the end, and not before."""
    fleet = Fleet(folder, devices=[drives.SLOW_LINK], budget=BUDGET)
    return fleet.run([replace(job, exact=False) for job in jobs], techniques=["shared offload"], **options)


# ---- the choice -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("sharing")
def test_jobs_that_share_a_device_have_the_bits_of_the_plain_loop(tmp_path: Path) -> None:
    """Also the trial's, which are compared with those of offload, and random numbers of the forward."""
    jobs = [
        drives.link_bound("link", optimizer=partial(hydra_ext.optim.AdamW, lr=1e-2)),
        drives.compute_bound("compute", dropout=0.3),
    ]
    results = Fleet(tmp_path, devices=[drives.SLOW_LINK], budget=BUDGET).run(jobs, techniques=["shared offload"])
    assert_as_alone(results, jobs)
    assert companions(results, "link") == [{"compute"}]
    past = history.load(tmp_path)
    assert past.plans[0].packs == [["compute", "link"]]
    assert all(
        isinstance(option, SharingOption) and set(option.loads) >= {"compute", "optimizer"}
        for each in past.measured.values()
        for option in each.options
    )


@pytest.mark.full
def test_jobs_with_one_bottleneck_have_a_device_each(tmp_path: Path) -> None:
    loss = partial(drives.slowly, seconds=0.1)
    jobs = [drives.compute_bound(f"compute-{i}", seed=i, loss=loss, steps=4) for i in range(2)]
    results = Fleet(tmp_path, devices=[drives.SLOW_LINK], budget=BUDGET).run(
        jobs, techniques=["offload", "shared offload"]
    )
    assert_as_alone(results, jobs)
    assert companions(results, "compute-0") == [set()]


def option(step: float, **loads: float) -> SharingOption:
    return SharingOption(
        technique="shared", name="shared", devices=1, configuration={}, bound="", step_s=step, open_s=0, save_s=0,
        loads=loads,
    )  # fmt: skip


def test_the_slowdown_is_the_largest_sum_of_parts() -> None:
    link, compute = option(2.0, link=1.8, compute=0.2), option(1.0, link=0.1, compute=1.0)
    assert slowdowns([link, compute]) == pytest.approx([1.1, 1.1])
    assert slowdowns([compute, compute]) == pytest.approx([2.0, 2.0])
    assert slowdowns([link, option(1.0)]) == [1.0, 1.0]
    assert slowdowns([compute]) == [1.0]


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=2), st.floats(1, 2))
def test_a_job_that_is_left_alone_goes_on_without_the_slowdown(alone: list[float], factor: float) -> None:
    """The recurrence: both make steps until one has ended, then the other one."""
    found = ends([factor * seconds for seconds in alone], factor)
    if len(alone) == 1:
        assert found == pytest.approx(alone)
    else:
        both = factor * min(alone)
        assert sorted(found) == pytest.approx([both, both + max(alone) - min(alone)])


def record(name: str, option: Option, *more: Option) -> JobRecord:
    return JobRecord({"name": name, "steps": 10, "seed": 0}, [option, *more], "/nowhere")


def alone(job: JobRecord) -> Pack:
    return Pack((job,), job.work(0.0, 1e9))


def test_jobs_with_different_bottlenecks_go_together() -> None:
    """Two that compute and two that wait for the optimizer; and one that has failed, and goes on alone."""
    resources = {"a": "compute", "b": "compute", "c": "optimizer", "d": "optimizer", "e": "link"}
    jobs = [record(name, option(1.0, **{resource: 0.95})) for name, resource in resources.items()]
    jobs[-1].failures.append("it was killed")
    packs = [alone(job) for job in jobs]
    assert [pack.names for pack in paired(packs, 0.0, 1e9)] == [("e",), ("a", "c"), ("b", "d")]
    assert [pack.names for pack in paired(packs[:2], 0.0, 1e9)] == [("a",), ("b",)]


def test_jobs_that_are_faster_alone_do_not_keep_others_from_sharing() -> None:
    """Two jobs fit a device as they are, and would be slow if they were offloaded."""
    facts = asdict(option(1.0))
    del facts["loads"]
    plain = Option(**facts)
    quick = [record(name, plain, option(5.0, **{kind: 4.0})) for name, kind in (("a", "link"), ("b", "compute"))]
    slow = [record(name, option(3.0, **{kind: 2.5})) for name, kind in (("c", "link"), ("d", "compute"))]
    found = paired([alone(job) for job in (*quick, *slow)], 0.0, 1e9)
    assert [pack.names for pack in found] == [("a",), ("b",), ("c", "d")]


def of_base(step: float, base: str = "a", seeded: bool = False, **loads: float) -> SharingOption:
    return replace(option(step, **loads), configuration={"base": base, "seeded": seeded})


FETCHES = "host to device"


def test_a_step_of_jobs_with_one_base_fetches_it_once() -> None:
    one, other = of_base(2.0, compute=0.5, **{FETCHES: 1.8}), of_base(1.0, compute=0.4, **{FETCHES: 0.9})
    assert slowdowns([one, other]) == pytest.approx([1.0, 2.0])  # 2 s: the longest of 0.9 s, 1.8 s and each alone
    assert slowdowns([one] * 6) == pytest.approx([1.5] * 6)  # 6 x 0.5 s of compute
    assert slowdowns([one]) == [1.0]


def test_jobs_with_one_base_are_gathered_on_the_devices_that_there_are() -> None:
    def jobs(names: str, **options: Any) -> list[JobRecord]:
        return [record(name, of_base(1.0, **{FETCHES: 0.9, "compute": 0.05}, **options)) for name in names]

    def gathered_names(given: Sequence[JobRecord], devices: int) -> list[tuple[str, ...]]:
        return [pack.names for pack in gathered([alone(job) for job in given], devices, 0.0, 1e9)]

    assert gathered_names(jobs("abcd"), 1) == [tuple("abcd")]
    assert gathered_names(jobs("abcd"), 2) == [tuple("ab"), tuple("cd")]
    assert gathered_names(jobs("abcd"), 8) == [tuple("ab"), tuple("cd")]
    assert gathered_names(jobs("abcdefghi"), 1) == [tuple("abcde"), tuple("fghi")]  # at most eight
    assert gathered_names([*jobs("ab"), *jobs("cd", base="other")], 1) == [tuple("ab"), tuple("cd")]
    assert gathered_names(jobs("ab", seeded=True), 1) == [tuple("ab")]  # both have seed 0
    differ = jobs("ab", seeded=True)
    differ[1].job = {**differ[1].job, "seed": 1}
    assert gathered_names(differ, 1) == [("a",), ("b",)]
    busy = [record(name, of_base(1.0, **{FETCHES: 0.1, "compute": 0.95})) for name in "ab"]
    assert gathered_names(busy, 1) == [("a",), ("b",)]  # they would gain nothing
    failed = jobs("abc")
    failed[0].failures.append("it was killed")
    assert gathered_names(failed, 1) == [("a",), tuple("bc")]
    assert [pack.names for pack in paired([alone(job) for job in jobs("ab")], 0.0, 1e9)] == [("a",), ("b",)]


def test_jobs_of_a_group_end_by_their_own_steps() -> None:
    """The steps of all are as long as those of the slowest, whichever are left."""
    pack = together([record(name, of_base(step, compute=0.1)) for name, step in (("a", 1.0), ("b", 2.0))], 0.0, 1e9,
                    common=True)  # fmt: skip
    assert pack.ends == pytest.approx((20, 20))


def test_a_pack_takes_as_long_as_its_jobs_together() -> None:
    """Waiting jobs are slowed down by each other; what is seen of those that run has the slowdown in it."""
    one, other = record("b", option(1.0, link=0.8)), record("a", option(2.0, link=1.4))
    pack = together([one, other], 0.0, 1e9)
    assert pack.names == ("a", "b")
    assert pack.work.name == "a + b"
    assert pack.ends == pytest.approx((15 + 10, 15))  # 1.5 x 10 s both, then 10 s of the longer one
    assert [each.seconds for each in pack.work.choices] == [pytest.approx(25)]
    for gang, job in enumerate((one, other)):
        job.seconds[0] *= 1.5
        job.state, job.running = JobState.RUNNING, Running(gang, 0, "here", (0,), 0, 0.0)
        job.running.opened = True
    assert together([one, other], 0.0, 1e9).ends == pytest.approx((25, 15))


def test_the_loads_of_a_step_are_between_the_figures_of_the_steps_that_count() -> None:
    def figures(step: int, seconds: float) -> TenantFigures:
        return TenantFigures(
            compute_seconds=seconds, to_device_seconds=2 * seconds, to_host_seconds=0, update_seconds=0, steps=step
        )

    noted = [figures(0, 0), figures(1, 9), figures(2, 10), figures(3, 11), figures(4, 12), figures(5, 14.5)]
    assert loads_of(noted) == {"compute": 1.5, "host to device": 3.0, "device to host": 0, "optimizer": 0}
    assert loads_of(noted[:2])["compute"] == 9


# ---- mishaps --------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.usefixtures("sharing")
def test_a_job_that_raises_does_not_disturb_the_one_beside_it(tmp_path: Path) -> None:
    loss = partial(trainings.mishap, what="raise", folder=trainings.tokens(tmp_path / "tokens", 1), after=14)
    jobs = [drives.link_bound("raises", loss=loss, steps=9), drives.compute_bound("other", steps=30)]
    results = shared(tmp_path / "fleet", jobs, interval=1e-3)
    assert_as_alone(results, [drives.link_bound("raises", steps=9), jobs[1]])
    assert "RuntimeError: the loss has had a mishap" in str(results["raises"].stretches[0].failure)
    assert [len(results[job.name].stretches) for job in jobs] == [2, 1]
    assert companions(results, "raises")[0] == {"other"}
    assert results["raises"].stretches[0].end < results["other"].stretches[0].end


@pytest.mark.full
@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize("what", ["kill", "hang"])
@pytest.mark.cases(1)
def test_jobs_whose_process_has_ended_go_on_alone(what: str, tmp_path: Path) -> None:
    """It is not known which of them is to blame."""
    loss = partial(trainings.mishap, what=what, folder=trainings.tokens(tmp_path / "tokens", 1), after=14)
    jobs = [drives.link_bound("blamed", loss=loss, steps=9), drives.compute_bound("other", steps=30)]
    results = shared(tmp_path / "fleet", jobs, interval=1e-3, patience=3.0)
    assert_as_alone(results, [drives.link_bound("blamed", steps=9), jobs[1]])
    for name in results:
        assert companions(results, name)[0] == {"blamed", "other"} - {name}
        assert companions(results, name)[1:] == [set()]


class StopsOne(Guide):
    def stops(self, job: str, step: int, loss: float) -> bool:
        return job == "link" and step == 3


@pytest.mark.full
@pytest.mark.usefixtures("sharing")
def test_a_job_that_is_stopped_leaves_the_device_to_the_other(tmp_path: Path) -> None:
    jobs = [drives.link_bound("link"), drives.compute_bound("compute", steps=30)]
    results = shared(tmp_path, jobs, guide=StopsOne())
    assert results["link"].outcome is Outcome.STOPPED
    assert hydra_ext.load_model(results["link"].folder, trainings.layered(96)).step == len(results["link"].losses) < 8
    assert_as_alone(results, jobs[1:])
    assert len(results["compute"].stretches) == 1
    assert results["link"].stretches[0].end < results["compute"].stretches[0].end
    assert not list(tmp_path.glob("*/gang-*"))  # requests and results of gangs


@pytest.mark.full
def test_a_fleet_with_shared_devices_goes_on_after_its_process_was_killed(tmp_path: Path) -> None:
    folder = tmp_path / "fleet"
    with driven(folder, "shared_jobs") as driver:
        wait_for(lambda: all("saved" in events(folder / name) for name in ("link", "compute")), driver)
        driver.kill()
    results = Fleet(folder).resume()
    assert_as_alone(results, drives.shared_jobs())
    assert all(result.stretches[0].failure == "the fleet's process had ended" for result in results.values())
    assert companions(results, "link") == [{"compute"}, {"compute"}]
