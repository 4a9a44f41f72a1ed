"""The trial runner on a cluster whose nodes come and go."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from hydra_ext.errors import StateError
from hydra_ext.fleet.cluster.interface import Ended, Event, Failure, Node, Order, Task
from hydra_ext.fleet.scheduling.settings import Settings
from hydra_ext.fleet.scheduling.trials import Measured, Trials
from support import fleet_folders
from support.fleet.virtual_cluster import node_of


class ScriptedCluster:
    """Each gang ends at once, with its result; before a gang of some number something happens.

    Attributes:
        there: Devices of each node.
        script: What happens instead of the end of a start, by its number: a node goes away, with its gangs.
        started: Task, node and number of devices of each start.
    """

    def __init__(self, there: dict[str, int], script: dict[int, Callable[[dict[str, int]], object]]) -> None:
        self.there = there
        self.script = script
        self.started: list[tuple[Task, str, int]] = []
        self._events: list[Event] = []

    def nodes(self) -> Sequence[Node]:
        return [node_of(name, devices) for name, devices in self.there.items()]

    def now(self) -> float:
        return 0.0

    def start(self, orders: Sequence[Order], node: str, devices: Sequence[int]) -> None:
        (order,) = orders
        assert len(devices) <= self.there[node]
        self.started.append((order.task, node, len(devices)))
        failure = None
        if len(self.started) in self.script:
            self.script[len(self.started)](self.there)
            failure = Failure(message="its node went away", is_lost=True)
        else:
            order.result_file.parent.mkdir(parents=True, exist_ok=True)
            order.result_file.write_text(json.dumps(_answers(order) if order.task is Task.SEARCH else TRIAL))
        self._events.append(Ended(gang=order.gang, failure=failure))

    def wait(self, seconds: float) -> Sequence[Event]:
        events, self._events = self._events, []
        return events

    def stop(self, gang: int) -> None: ...

    def kill(self, gang: int) -> None: ...

    def close(self) -> None: ...


TRIAL = {"step_s": 1.0, "open_s": 2.0, "save_s": 3.0, "digest": "the same"}


def _answers(order: Order) -> list[dict[str, Any]]:
    facts = {"configuration": {}, "why_not": "", "bound": "", "smallest_budget": None}
    return [
        {"technique": place, "name": place, "devices": devices, **facts}
        for place, devices in order.configuration["asked"]
    ]


def measured(cluster: ScriptedCluster, folder: Path, notes: list[str]) -> Measured:
    trials = Trials(
        cluster,
        folder,
        ["plain", "pipeline"],
        Settings(interval=1.0, patience=1.0),
        gangs=count(1),
        record=lambda event, **more: notes.append(event),
    )
    job = fleet_folders.job("a").describe()
    return trials.measure([job])["a"]


def goes(name: str) -> Callable[[dict[str, int]], object]:
    return lambda there: there.pop(name)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_what_ran_on_a_node_that_went_away_begins_again_on_another(number: int, tmp_path: Path) -> None:
    """During the search, and during each of the trials."""
    notes: list[str] = []
    cluster = ScriptedCluster({"large": 2, "other": 2}, {number: goes("large")})
    found = measured(cluster, tmp_path / "trials", notes)
    assert [(option.technique, option.devices) for option in found.options] == [("plain", 1), ("pipeline", 2)]
    assert notes == ["measured"]
    assert [node for _, node, _ in cluster.started] == ["large"] * number + ["other"] * (4 - number)


def is_killed(there: dict[str, int]) -> None:
    """By the system, and the node stays."""


@pytest.mark.parametrize("number", [1, 2, 3])
def test_what_was_killed_begins_again(number: int, tmp_path: Path) -> None:
    """During the search, and during each of the trials."""
    notes: list[str] = []
    cluster = ScriptedCluster({"large": 2}, {number: is_killed, number + 1: is_killed})
    found = measured(cluster, tmp_path / "trials", notes)
    assert [(option.technique, option.devices) for option in found.options] == [("plain", 1), ("pipeline", 2)]
    assert notes == ["measured"]
    assert len(cluster.started) == 5


def test_a_trial_that_is_always_killed_has_failed(tmp_path: Path) -> None:
    cluster = ScriptedCluster({"large": 2}, dict.fromkeys(range(3, 6), is_killed))
    found = measured(cluster, tmp_path / "trials", [])
    assert [(option.technique, option.devices) for option in found.options] == [("plain", 1)]
    assert "pipeline on 2" in found.refused
    assert len(cluster.started) == 5


def test_trials_that_no_node_has_the_devices_for_are_left_to_a_later_run(tmp_path: Path) -> None:
    notes: list[str] = []
    cluster = ScriptedCluster({"large": 2, "small": 1}, {3: goes("large")})
    found = measured(cluster, tmp_path / "trials", notes)
    assert [(option.technique, option.devices) for option in found.options] == [("plain", 1)]
    assert found.refused["pipeline on 2"] == "no node that is left has so many devices"
    assert notes == []


def test_without_a_node_the_trials_end(tmp_path: Path) -> None:
    cluster = ScriptedCluster({"only": 2}, {2: goes("only")})
    with pytest.raises(StateError, match="no node is left: call resume"):
        measured(cluster, tmp_path / "trials", [])
