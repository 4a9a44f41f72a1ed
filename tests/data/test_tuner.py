"""A tuned loader gives the same items, is as fast as it can be, and keeps to its memory as others see it."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchdata.nodes import IterableWrapper

from hydra_ext import data
from hydra_ext.data import beginnings
from hydra_ext.data.tuning import tuner
from hydra_ext.errors import InvalidArgument, MemoryLimitTooSmall, StateError
from support.data import functions, outside
from support.data.batches import digest

_TINY = 40  # items: more than the shortest intervals have


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "_SHORTEST", 0.2)
    monkeypatch.setattr(tuner, "_LOOK", 0.02)


def waiting(seconds: float, *, nbytes: int = 2**20) -> data.Map:
    """Two stages, the first of which waits and has some memory."""
    node = data.Map(IterableWrapper(itertools.count()), functions.Slow(seconds, nbytes), name="waits")
    return data.Map(node, functions.same, name="same")


def until(condition: Any, loader: data.Loader) -> Iterator[Any]:
    """Items of a loader until something holds, for at most two minutes."""
    end = time.monotonic() + 120
    for item in loader:
        yield item
        if condition():
            return
        if time.monotonic() > end:
            pytest.fail(f"it has not happened within two minutes: {loader.report()}")


def base_bytes(nbytes: int) -> int:
    """What these stages take with one worker each."""
    with data.tuned(waiting(0.001, nbytes=nbytes), memory="16GiB") as loader:
        for _ in until(lambda: intervals(loader), loader):
            pass
        return intervals(loader)[0].view.memory


def intervals(loader: data.Loader) -> Sequence[data.Interval]:
    report = loader.report().tuning
    assert report is not None
    return report.intervals


def test_a_stage_that_is_waited_for_gets_workers_and_items_stay_the_same() -> None:
    with data.tuned(waiting(0.01), memory="16GiB") as loader:
        found = [digest(each) for each in until(lambda: len(intervals(loader)) > 4, loader)]
        report = loader.report().tuning
    assert report is not None
    assert found == [digest(functions.rows(item)) for item in range(len(found))]
    assert [stage.workers for stage in report.intervals[0].view.stages] == [1, 1]
    assert report.binding()[0] == "waits"
    assert max(each.workers[0] for each in report.intervals) > 1


def test_an_iteration_is_tuned_whose_loader_nothing_else_holds() -> None:
    iterator = iter(data.tuned(waiting(0.01), memory="16GiB"))
    gc.collect()
    end = time.monotonic() + 120
    nodes = beginnings.nodes_of(iterator._root)  # type: ignore[attr-defined]
    stages = {each.name: each for each in nodes if isinstance(each, data.Map)}
    while stages["waits"].workers == 1:
        next(iterator)
        assert time.monotonic() < end
    threads = [each for each in threading.enumerate() if each.name == "hydra_ext tuner"]
    del iterator, nodes, stages
    gc.collect()
    for thread in threads:
        thread.join(60)
    assert [thread.is_alive() for thread in threads] == [False]


@pytest.mark.full
def test_a_training_that_keeps_all_results_goes_on_beside_the_memory() -> None:
    with data.tuned(waiting(0.0), memory=base_bytes(2**20) + 8 * 2**20) as loader:
        kept = list(itertools.islice(loader, 1200))  # 25 MB
        assert loader.report().inline > 0
        assert [digest(each) for each in kept[::100]] == [digest(functions.rows(item)) for item in range(0, 1200, 100)]


def test_calls_that_raise_count_as_work_where_they_are_left_out() -> None:
    node = data.Map(IterableWrapper(itertools.count()), functions.SlowOrOdd(0.01), name="odd", on_error="skip")
    with data.tuned(node, memory="16GiB") as loader:
        for _ in until(lambda: intervals(loader), loader):
            pass
        assert intervals(loader)[0].view.stages[0].service >= 0.018  # two calls for an item


def test_a_tuner_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(tuner.Rule, "decide", fails)
    with (
        data.tuned(waiting(0.001), memory="16GiB") as loader,
        pytest.raises(StateError, match="not tuned any more: RuntimeError: can't start new thread"),
    ):
        for _ in until(lambda: False, loader):
            pass


@pytest.mark.full
def test_memory_measured_from_outside_stays_below_the_limit(tmp_path: Path) -> None:
    """The stage would use many workers, and there is memory for two."""
    nbytes = 48 * 2**20
    limit = base_bytes(nbytes) + nbytes + nbytes // 2
    measured = tmp_path / "measured"
    with data.tuned(waiting(0.05, nbytes=nbytes), memory=limit) as loader:
        items = until(lambda: is_full(loader), loader)
        next(items)
        server = loader._workshop.processes[0]
        with subprocess.Popen([sys.executable, outside.__file__, str(server), str(measured)]):
            try:
                for _ in items:
                    pass
            finally:
                (tmp_path / "measured.over").touch()
        assert max(each.workers[0] for each in intervals(loader)) == 2
    figures = [int(line) for line in measured.read_text().split()]
    assert 2 * nbytes < max(figures) <= limit


def is_full(loader: data.Loader) -> bool:
    """Whether two workers ran for some intervals."""
    return sum(each.view.stages[0].workers == 2 for each in intervals(loader)) > 2


@pytest.mark.full
def test_workers_that_grow_are_taken_back_and_then_it_is_told(tmp_path: Path) -> None:
    asked = tmp_path / "grow"
    node = data.Map(IterableWrapper(itertools.count()), functions.Grows(asked, 2**18), name="grows")
    with data.tuned(node, memory=base_bytes(2**20) + 64 * 2**20) as loader:
        iterator = until(lambda: False, loader)
        next(iterator)
        loader.stages["grows"].workers = 3
        for _ in itertools.islice(iterator, _TINY):
            pass
        asked.touch()
        with pytest.raises(MemoryLimitTooSmall, match="one worker for each stage") as caught:
            list(iterator)
        assert loader.stages["grows"].workers == 1
        assert caught.value.needed > caught.value.limit
        with pytest.raises(MemoryLimitTooSmall):  # until there is more memory, which is another loader's
            next(iter(loader))


def test_a_limit_below_one_worker_for_each_stage_says_what_is_needed() -> None:
    with data.tuned(waiting(0.001), memory="16MiB") as loader:
        expected = r"takes \d+ bytes, and it may take 16777216: give a larger memory="
        with pytest.raises(MemoryLimitTooSmall, match=expected) as caught:
            list(loader)
        assert caught.value.needed > caught.value.limit == 16 * 2**20


def test_from_dataset_is_tuned_by_itself_with_the_bits_of_dataloader() -> None:
    dataset = TensorDataset(torch.arange(4000.0).reshape(1000, 4))
    torch.manual_seed(3)
    plain = [digest(each) for each in DataLoader(dataset, batch_size=3, shuffle=True)]
    torch.manual_seed(3)
    with data.from_dataset(dataset, batch_size=3, shuffle=True) as loader:
        assert [digest(each) for each in loader] == plain
        assert loader.report().tuning is not None
    with data.from_dataset(dataset, batch_size=3, num_workers=1) as loader:
        assert loader.report().tuning is None


def test_a_loader_that_is_let_go_ends_its_tuner() -> None:
    loader = data.tuned(data.Map(IterableWrapper(range(10)), functions.same, name="same"), memory="16GiB")
    assert len(list(loader)) == 10
    (thread,) = [each for each in threading.enumerate() if each.name == "hydra_ext tuner"]
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None
    thread.join(60)
    assert not thread.is_alive()


def test_a_pipeline_without_workers_has_nothing_to_tune() -> None:
    with pytest.raises(InvalidArgument, match="no workers to tune"):
        data.tuned(IterableWrapper(range(3)), memory="1GiB")


def test_the_report_draws_and_says_what_binds(tmp_path: Path) -> None:
    views = [
        data.View(
            [data.StageView(1, 0.022, 2**20, 0.5), data.StageView(count, 0.04, 2**20)], rate, starved, 2**29, 2**30
        )
        for count, rate, starved in ((1, 25.0, 0.75), (2, 50.0, 0.5), (8, 100.0, 0.0))
    ]
    intervals = [
        data.Interval(float(number), number + 1.0, view, (1, 2 ** (number + 1))) for number, view in enumerate(views)
    ]
    report = data.TuningReport(("read", "decode"), intervals)
    assert report.binding() == ["decode", "read", "training"]
    assert str(report) == (
        "100.0 items a second, of 100.0 that training takes; training binds; workers: read 1, decode 8; 512 of 1024 MiB"
    )
    assert [round(view.pace(), 6) for view in views] == [100.0] * 3
    report.save_png(tmp_path / "tuned.png")
    assert (tmp_path / "tuned.png").read_bytes().startswith(b"\x89PNG")
    assert str(data.TuningReport(("read",), ())) == "not tuned yet"
