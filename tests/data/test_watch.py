"""What a tuner sees: figures of stages that are set by hand."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import pytest

from hydra_ext.data import ItemFigures, WorkerFigures
from hydra_ext.data.tuning import memory
from hydra_ext.data.tuning.rule import shed
from hydra_ext.data.tuning.views import Consumer, StageView, View
from hydra_ext.data.tuning.watch import Watch
from hydra_ext.data.workers.processes import Workshop


class Stage:
    name = "stage"
    method = "thread"
    workers = 2
    per_worker = 3

    def __init__(self) -> None:
        self.figures = WorkerFigures(workers=2, busy=0, waiting=0, done=0, seconds=0.0, nbytes=0)

    def worker_figures(self) -> WorkerFigures:
        return self.figures

    def item_figures(self) -> ItemFigures:
        return ItemFigures(depth=6, given=0, ready=3, source_seconds=0.0, starved_seconds=0.0)


def watched(stage: Any, consumer: Consumer) -> Watch:
    return Watch([stage], Workshop(2**20), consumer, 2**30)


def takes(consumer: Consumer, items: int) -> None:
    for _ in range(items):
        consumer.took(0.25)


def test_service_is_for_one_item_of_the_consumer_and_leaves_out_what_filled_the_queues() -> None:
    stage, consumer = Stage(), Consumer()
    watch = watched(stage, consumer)
    takes(consumer, 1)
    stage.figures = replace(stage.figures, done=3000, seconds=6.0, nbytes=3000 * 100)
    watch.begin()
    takes(consumer, 10)
    stage.figures = replace(stage.figures, done=3050, seconds=6.0 + 50 * 0.004, nbytes=3050 * 100)
    (view,) = watch.view().stages
    assert abs(view.service - 5 * 0.004) < 1e-12
    assert (view.workers, view.worker_bytes, view.ready) == (2, 3 * 100, 0.5)
    takes(consumer, 10)  # nothing was made in this interval: the service is that of the last one
    assert abs(watch.view().stages[0].service - 2.5 * 0.004) < 1e-12


def test_a_stage_of_which_nothing_is_known_has_no_service() -> None:
    watch = watched(Stage(), Consumer())
    watch.begin()
    assert watch.view().stages[0].service == 0.0


def test_a_consumer_that_did_something_else_has_paused() -> None:
    consumer = Consumer()
    watch = watched(Stage(), consumer)
    takes(consumer, 3)
    assert not watch.pauses
    consumer._last -= 60  # as if the last item had been taken a minute ago
    watch.at = time.perf_counter() - 61
    consumer.took(1.0)
    assert consumer.gap >= 59
    assert watch.pauses
    watch.again()
    takes(consumer, 3)
    assert not watch.pauses


def test_waiting_is_no_pause() -> None:
    consumer = Consumer()
    watch = watched(Stage(), consumer)
    takes(consumer, 1)
    consumer._last -= 60
    watch.at = time.perf_counter() - 61
    consumer.took(60.0)
    assert not watch.pauses


def test_workers_that_are_not_wanted_any_more_are_leaving() -> None:
    stage = Stage()
    watch = watched(stage, Consumer())
    stage.figures = replace(stage.figures, done=10, nbytes=1000, workers=5)
    assert watch.leaving() == 3 * 3 * 100


def test_shedding_takes_the_largest_first_and_none_that_frees_nothing() -> None:
    stages = [StageView(3, 0.1, 10), StageView(2, 0.1, 50), StageView(9, 0.1, 0)]
    assert shed(View(stages, 1.0, 0.0, 100, 100)) == (3, 2, 9)
    assert shed(View(stages, 1.0, 0.0, 101, 100)) == (3, 1, 9)
    assert shed(View(stages, 1.0, 0.0, 165, 100)) == (1, 1, 9)
    assert shed(View(stages, 1.0, 0.0, 999, 100)) == (1, 1, 9)


def test_what_processes_had_not_loaded_when_they_were_counted_first_is_counted_when_the_first_interval_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [0]
    monkeypatch.setattr(memory, "libraries", lambda process: found[0])
    watch = Watch([Stage()], workshop := Workshop(2**20), Consumer(), 2**30)
    workshop.workers[os.getpid()] = "stage"
    without = watch.memory()
    found[0] = 2**40
    assert watch.memory() < without + 2**39  # for now the cheap count is enough
    watch.begin()
    assert watch.memory() > without + 2**39
