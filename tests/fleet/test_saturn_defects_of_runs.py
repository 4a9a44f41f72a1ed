"""Defects of Saturn's released code that concern how jobs run: none of them is here."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hydra_ext.fleet import Fleet, Gang, Job, Session, Technique, WontDo
from hydra_ext.fleet.cluster import training
from hydra_ext.fleet.cluster.interface import Order, Task
from hydra_ext.fleet.devices import Device, choose
from hydra_ext.fleet.scheduling.settings import Settings
from hydra_ext.fleet.techniques import technique_named
from hydra_ext.plan import solve
from support.fleet import trainings
from support.fleet.comparison import assert_as_alone

SETTINGS = Settings(interval=1.0, patience=1.0)
OPTIONS = [{"gpus": 1, "runtime_s": 4.0}, {"gpus": 2, "runtime_s": 2.5}]
PROBLEM = {"nodes": [4, 4], "jobs": [{"name": str(i), "options": OPTIONS} for i in range(9)]}


def test_2_options_of_the_solver_have_names() -> None:
    """Theirs were passed by the wrong position: the time limit was a number of cores."""
    with pytest.raises(TypeError):
        solve("spase", PROBLEM, 3)  # type: ignore[misc]
    assert solve("spase", PROBLEM, seed=1, effort=2) == solve("spase", PROBLEM, seed=1, effort=2)


@pytest.mark.full
def test_4_optimizer_schedule_and_random_numbers_survive_every_interval(tmp_path: Path) -> None:
    """A job that is stopped and started again at each of its steps."""
    for steps in range(1, 5):
        job = trainings.job("a", dropout=0.3, steps=steps)
        folder = tmp_path / str(steps)
        if steps > 1:
            (folder / "a").mkdir(parents=True)
            (tmp_path / str(steps - 1) / "a" / "ckpt").rename(folder / "a" / "ckpt")
        technique = ("plain", "offload")[steps % 2]
        results = Fleet(folder, devices=2, budget="1MiB").run([job], techniques=[technique])
        assert set(results["a"].losses) == {steps}
    weights, losses, _ = trainings.plainly(job, threads=results.threads or 1)
    assert results["a"].loss == losses[-1]
    found = trainings.loaded(results["a"].folder, job)
    assert all(found[name].equal(weight) for name, weight in weights.items())


@pytest.mark.every_case
@pytest.mark.parametrize("technique", ["data parallel", "fsdp"])
def test_5_a_batch_is_never_made_smaller(technique: str) -> None:
    """Theirs was divided by the number of ranks and rounded down; the next one was replayed."""
    job = trainings.job("a", exact=False)
    assert len(job.data()[0]) == 2  # type: ignore[index]
    with pytest.raises(WontDo, match="a step has 2 microbatches, which 3 ranks cannot share equally; the batch stays"):
        technique_named(technique).search(job, choose(3, "1MiB"))


class Timed(Technique):
    """Notes the order of steps and of waits for the device."""

    name = "timed"

    def __init__(self) -> None:
        self.notes: list[str] = []

    def counts(self, devices: int) -> Sequence[int]:
        return [1]

    def search(self, job: Job, devices: Sequence[Device]) -> Mapping[str, Any]:
        return {}

    @contextmanager
    def open(self, job: Job, gang: Gang, configuration: Mapping[str, Any]) -> Iterator[Session]:
        yield TimedSession(self.notes)


class TimedSession(Session):
    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def step(self, microbatches: Sequence[Any], seeds: Sequence[int]) -> float:
        self._notes.append("step")
        return 1.0

    def evaluate(self, microbatches: Sequence[Any]) -> float:
        return 1.0

    def save(self, folder: Path, extra: Any) -> None:
        self._notes.append("save")

    def load(self, folder: Path) -> tuple[int, Any] | None:
        return None

    @property
    def trained(self) -> Sequence[Any]:
        return ()


def test_8_times_are_taken_when_the_device_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    technique, (device,) = Timed(), choose(1, "1MiB")
    monkeypatch.setattr(Device, "synchronize", lambda self: technique.notes.append("wait"))
    job = trainings.job("a")
    order = Order(
        gang=1,
        task=Task.TRIAL,
        job=job.describe(),
        folder=str(tmp_path),
        devices=[device.describe()],
        settings=SETTINGS,
    )
    training.try_out(order, job, Gang(device=device, rank=0, ranks=1), technique, begun=time.monotonic())
    steps = training.WARM_UP + training.MEASURED
    assert technique.notes == ["step", "wait"] * steps + ["save"]
    assert set(json.loads(order.result_file.read_text())) == {"open_s", "step_s", "save_s", "digest"}


@pytest.mark.full
def test_8_all_that_would_do_is_measured_and_the_fastest_is_taken(tmp_path: Path) -> None:
    """Theirs took the first setting that fitted."""
    job = trainings.job("a", steps=4)
    results = Fleet(tmp_path, devices=2, budget="1MiB").run([job], techniques=["offload", "plain"])
    assert_as_alone(results, [job])
    assert results["a"].stretches[0].technique == "plain"
