"""A run tells how long its thread has waited for loaders, in its report, in its figures and in its trace."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchdata.nodes import BaseNode, IterableWrapper

import hydra_ext
from hydra_ext import Run, StepFigures, data
from hydra_ext.data import waits
from hydra_ext.runtime.reporting import figures
from hydra_ext.runtime.reporting.figures import DataReport
from support import traces

SECOND = 10**9  # nanoseconds


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = 7 * SECOND
        for module in (waits, figures):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic_ns=lambda: self._now))

    def pass_by(self, seconds: int) -> None:
        self._now += seconds * SECOND


class Slow(BaseNode[Any]):
    """So many items, each of which takes three seconds; the end takes one."""

    def __init__(self, items: int, clock: Clock | None = None) -> None:
        super().__init__()
        self._items = items
        self._clock = clock
        self._given = 0

    def reset(self, initial_state: Any = None) -> None:
        super().reset(initial_state)
        self._given = 0

    def next(self) -> torch.Tensor:
        self._given += 1
        if self._clock is not None:
            self._clock.pass_by(3 if self._given <= self._items else 1)
        if self._given > self._items:
            raise StopIteration
        return torch.ones(2, 4)

    def get_state(self) -> dict[str, Any]:
        return {}


@contextmanager
def offloaded() -> Iterator[Run]:
    model = nn.Linear(4, 4)
    with hydra_ext.offload(model, torch.optim.SGD(model.parameters(), lr=0.1), budget="1MiB") as run:
        yield run


def train(run: Run, loader: data.Loader) -> None:
    for x in loader:
        run.model(x).sum().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


def test_the_report_has_waits_inside_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with data.Loader(Slow(2, clock)) as loader:
        list(loader)
        with offloaded() as run:
            assert run.report().data == DataReport(waits=0, seconds=0.0, share=0.0)
            assert "data  " not in str(run.report())
            clock.pass_by(7)
            train(run, loader)
            assert run.report().data == DataReport(waits=4, seconds=7.0, share=0.5)
            assert "data     7.000 s waited for, 50.0% of the time, in 4 waits" in str(run.report())
            clock.pass_by(14)
        list(loader)
        assert run.report().data == DataReport(waits=4, seconds=7.0, share=0.25)


def test_a_loader_over_a_loader_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    outer = data.Loader(data.Batch(IterableWrapper(data.Loader(Slow(3, clock))), 2))
    with offloaded() as run:
        assert [len(batch) for batch in outer] == [2, 1]
        clock.pass_by(2)
        assert run.report().data == DataReport(waits=4, seconds=11.0, share=11 / 13)  # the end is asked for twice


def test_what_a_node_takes_again_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an iteration begins, before its first item."""
    clock = Clock(monkeypatch)

    def make() -> data.Loader:
        return data.Loader(data.Shuffle(Slow(4, clock), 4))

    with make() as loader:
        next(iter(loader))
        state = loader.state_dict()
    with make() as loader, offloaded() as run:
        loader.load_state_dict(state)
        iter(loader)
        assert run.report().data == DataReport(waits=1, seconds=12.0, share=1.0)


def test_waits_of_other_threads_hold_nothing_up() -> None:
    with data.Loader(Slow(2)) as loader, offloaded() as run:
        other = threading.Thread(target=lambda: list(loader))
        other.start()
        other.join()
        assert run.report().data.waits == 0
        with offloaded() as second:
            list(loader)
            assert (run.report().data.waits, second.report().data.waits) == (4, 4)


def test_figures_of_steps_do_not_take_waits_for_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    seen: list[StepFigures] = []
    with data.Loader(Slow(2, clock)) as loader, offloaded() as run:
        run.on_step(seen.append)
        for x in loader:
            run.model(x).sum().backward()
            clock.pass_by(2)
            run.optimizer.step()
            run.optimizer.zero_grad()
        run.optimizer.register_step_pre_hook(lambda *_: clock.pass_by(4))
        run.step([torch.ones(2, 4)], lambda x: run.model(x).sum())
    assert [step.binding for step in seen] == ["data", "data", "optimizer"]
    assert [step.seconds for step in seen] == [5.0, 5.0, 4.0]
    for step, of_data, rest in zip(seen, (3, 3, 0), (2, 2, 0), strict=True):
        assert step.waited_seconds >= of_data  # the rest is waited for weights, by a real clock
        assert step.compute_seconds <= rest


def test_the_trace_has_each_wait(tmp_path: Path) -> None:
    with data.Loader(Slow(3)) as loader, offloaded() as run:
        with run.trace(tmp_path / "trace.json"):
            train(run, loader)
        report = run.report().data
    found = [each for each in traces.read(tmp_path / "trace.json").row("compute", "wait") if "data" in each["name"]]
    assert [each["name"] for each in found] == ["waits for data"] * report.waits
    assert report.waits == 5  # for the epoch's begin, too
    assert sum(traces.end(each) - traces.begin(each) for each in found) == round(report.seconds * SECOND)
    assert not traces.overlapping(found)
