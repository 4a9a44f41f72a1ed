"""What is wrong in the executor that Saturn's authors released, one test each. Its solver: tests/plan/test_spase.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from hydra_ext.fleet.scheduling import planning
from hydra_ext.plan import solve
from support.fleet.virtual_cluster import Fault, Speed, Trouble
from support.fleet.virtual_fleet import Curve, VirtualFleet


def test_nodes_of_any_size_are_used() -> None:
    """Defect 1: the solver takes each node to have eight devices."""
    sizes = {"a": 2, "b": 2, "c": 4, "d": 8}
    jobs: dict[str, Curve] = {f"on {name}": {devices: 1000.0} for name, devices in sizes.items()}
    fleet = VirtualFleet(sizes, jobs)
    assert fleet.run() == pytest.approx(1000.0)
    assert {len(stretch.devices): sizes[stretch.node] for stretch in fleet.cluster.stretches} == {2: 2, 4: 4, 8: 8}


@pytest.mark.every_case
@pytest.mark.parametrize(("on_two", "moves"), [(995.0, 0), (985.0, 1)])
def test_the_tolerance_applies_to_a_new_plan(on_two: float, moves: int) -> None:
    """Defect 3: the makespan that the tolerance refers to is never set. Here a plan has to gain 1 %."""
    # The long job has 700 s left when the short one ends; with its device it would have 0.7 times on_two.
    jobs: dict[str, Curve] = {"long": {1: 1000.0, 2: on_two}, "short": {1: 300.0}}
    fleet = VirtualFleet({"a": 2}, jobs)
    fleet.run()
    assert fleet.moves == moves


def test_no_sentinel_stands_for_what_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect 6: infeasible options have runtimes of 1e6 or 1e8 s, beside a big-M of 1e10 which lets jobs overlap."""
    runtimes = []

    def noted(kind: str, problem: Mapping[str, Any], **settings: Any) -> Any:
        runtimes.extend(option["runtime_s"] for job in problem["jobs"] for option in job["options"])
        return solve(kind, problem, **settings)

    monkeypatch.setattr(planning, "solve", noted)
    # One job takes thirty years, one a millisecond, and one cannot run on two devices.
    jobs: dict[str, Curve] = {"years": {1: 1e9}, "moment": {1: 1e-3}, "alone": {1: 10.0, 2: 1.0}}
    troubles = [Fault("alone", 0, Trouble.WONT_DO, technique="on 2")]
    fleet = VirtualFleet({"a": 2}, jobs, faults=troubles, interval=1e8, patience=1e6)
    assert fleet.run() == pytest.approx(1e9, rel=1e-9)
    assert {round(runtime, 3) for runtime in runtimes} >= {1e9, 1e-3, 10.0, 1.0}
    assert max(runtimes) <= 1e9 * (1 + 1e-9)


def test_a_slow_job_delays_no_other_at_an_interval() -> None:
    """Defect 7: at each interval all jobs stop, and the next round waits for the last of them."""
    jobs: dict[str, Curve] = {"slow": {1: 9000.0}, **{f"short{i}": {1: 450.0} for i in range(20)}}
    fleet = VirtualFleet({"a": 2}, jobs, steps=10, interval=100.0, patience=1e5)
    fleet.cluster.speeds = lambda job, technique, devices: Speed(900.0 if job == "slow" else 45.0)
    assert fleet.run() == pytest.approx(9000.0)
    ends = sorted(stretch.end for stretch in fleet.cluster.stretches if stretch.job != "slow")
    assert ends == pytest.approx([450.0 * (i + 1) for i in range(20)])
    assert len(fleet.cluster.stretches) == 21
    assert fleet.scheduler.plans > 20
