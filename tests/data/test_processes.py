"""Whatever becomes of worker processes, batches are the same or an error says what happened, and nothing is left."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.nodes import IterableWrapper

from hydra_ext import data
from hydra_ext.data.stages import ahead
from hydra_ext.data.workers.processes import Workshop
from hydra_ext.errors import InvalidStage, SampleTooLarge, StageFailed, StateError, WorkersDied
from support.data import functions
from support.data.batches import digest


def mapped(items: Any, function: Any, **options: Any) -> data.Loader:
    memory = options.pop("memory", "64MiB")
    return data.Loader(data.Map(IterableWrapper(items), function, name="rows", **options), memory=memory)


def processes_of(loader: data.Loader) -> list[int]:
    return loader._workshop.processes


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        if time.monotonic() > end:
            pytest.fail("it has not happened within a minute")
        time.sleep(0.002)


# ---- deaths ---------------------------------------------------------------------------------------------------------


def test_fifty_deaths_of_workers_change_nothing(tmp_path: Path) -> None:
    items = list(range(120))
    died = set(items[5:55])
    with mapped(items, functions.Kills(tmp_path, died, 1), workers=3) as loader:
        found = [digest(each) for each in loader]
        assert loader.report().deaths == 50
    assert found == [digest(functions.rows(item)) for item in items]
    assert {int(file.name) for file in tmp_path.iterdir()} == died


def test_a_sample_that_kills_every_worker_is_named(tmp_path: Path) -> None:
    with mapped(range(4), functions.Kills(tmp_path, {2}, 9), workers=2) as loader:
        iterator = iter(loader)
        assert [int(next(iterator)["array"][0]) for _ in range(2)] == [0, 1]
        with pytest.raises(WorkersDied, match=r"stage 'rows', sample 2: 3 workers have died of it") as caught:
            next(iterator)
        assert (caught.value.stage, caught.value.number) == ("rows", 2)
        assert int(next(iterator)["array"][0]) == 3


def test_what_a_function_changes_is_new_again_when_it_is_tried_again(tmp_path: Path) -> None:
    node: Any = data.Map(IterableWrapper(range(6)), functions.rows, name="rows")
    with data.Loader(data.Map(node, functions.DoublesInPlace(tmp_path), name="doubles")) as loader:
        assert [float(item["tensor"][0, 0]) for item in loader] == [0, 2, 4, 6, 8, 10]
        assert loader.report().deaths == 1


@pytest.mark.full
def test_workers_outlive_the_process_that_they_are_forked_from() -> None:
    """In the sense that others take their place."""
    with mapped(range(60), functions.rows, workers=2) as loader:
        found = []
        for number, each in enumerate(loader):
            found.append(digest(each))
            if number in (5, 20):
                processes = processes_of(loader)
                os.kill(processes[0], signal.SIGKILL)
                while any(map(alive, processes)):  # a busy machine ends them late, and they go on until then
                    os.sched_yield()
        assert loader.report().deaths > 0
    assert found == [digest(functions.rows(item)) for item in range(60)]


TRAINING = """
import sys, time
from torchdata.nodes import IterableWrapper
from hydra_ext import data
from support.data import functions
if __name__ == "__main__":
    loader = data.Loader(data.Map(IterableWrapper(range(10**6)), functions.rows, workers=3, name="rows"))
    iterator = iter(loader)
    for _ in range(20):
        next(iterator)
    print(*loader._workshop.processes, flush=True)
    time.sleep(600)
"""


def test_nothing_is_left_of_a_training_that_was_killed(tmp_path: Path) -> None:
    shared = set(os.listdir("/dev/shm"))
    program = tmp_path / "training.py"
    program.write_text(TRAINING)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, env=environment) as training:
        assert training.stdout is not None
        processes = [int(each) for each in training.stdout.readline().split()]
        assert len(processes) == 4
        assert all(map(alive, processes))
        training.kill()
    wait_until(lambda: not any(map(alive, processes)))
    assert set(os.listdir("/dev/shm")) <= shared


# ---- processes ------------------------------------------------------------------------------------------------------


def test_workers_leave_when_fewer_are_wanted_and_come_back() -> None:
    with mapped(range(400), functions.process_of, workers=3) as loader:
        stage, seen = loader.stages["rows"], set()
        for number, (item, process) in enumerate(loader):
            assert item == number
            seen.add(process)
            if number == 100:
                stage.workers = 1
                wait_until(lambda: len(processes_of(loader)) == 2)
            if number == 200:
                stage.workers = 4
        assert len(seen) > 3
        server, *rest = processes_of(loader)
        assert len(rest) == 4
    wait_until(lambda: not any(map(alive, [server, *rest])))


@pytest.mark.every_case
@pytest.mark.parametrize("ends", ["frees", "closes", "goes"])
def test_a_forked_child_leaves_workers_and_results_alone(ends: str) -> None:
    """Results are what they were also where a child frees its own, which lie in the same pages."""
    with data.from_dataset(functions.Rows(12), 2, num_workers=1) as loader:
        batches = iter(loader)
        first = next(batches)
        expected = digest(first)
        loader._workshop.region.limit = 0  # as where processes have taken the memory
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if ends == "closes":
                    loader.close()
                elif ends == "goes":
                    with pytest.raises(StateError, match="a fork has made"):
                        next(batches)
                del first
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert digest(first) == expected
        loader._workshop.region.limit = loader._workshop.region.most
        assert [float(batch["array"][0, 0]) for batch in batches] == [2, 4, 6, 8, 10]
        assert loader.report().deaths == 0


@pytest.mark.full
def test_a_large_function_is_kept_on_disk() -> None:
    """The training has its dataset once, and a server that takes another's place gets it anew."""
    with mapped(range(30), functions.Large(), workers=1) as loader:
        found = []
        for each in loader:
            found.append(each)
            if each == 5:
                (kept,) = loader._workshop._servers._functions
                assert kept.data._rolled  # type: ignore[attr-defined]  # into a file
                os.kill(processes_of(loader)[0], signal.SIGKILL)
        assert loader.report().deaths > 0
    assert found == list(range(30))


def test_workers_have_the_trainings_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with mapped(range(2), functions.drawn) as loader:
            assert [item["torch"].dtype for item in loader] == [torch.float64] * 2
    finally:
        torch.set_default_dtype(torch.float32)


def test_nested_tensors_come() -> None:
    with mapped(range(2), functions.nested) as loader:
        assert [[each.tolist() for each in item.unbind()] for item in loader] == [[[0], [0, 0]], [[1], [1, 1]]]


def test_what_cannot_be_taken_over_from_a_worker_is_told() -> None:
    with mapped(range(3), functions.CannotBeMade) as loader:
        batches = iter(loader)
        with pytest.raises(StageFailed, match=r"'rows', sample 0: what its function has made.*KeyError: 'not here'"):
            next(batches)


def test_a_training_with_threads_is_not_forked() -> None:
    """A lock that another thread holds while workers start is no worker's."""
    lock = threading.Lock()
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            go_on.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        with mapped(range(6), functions.rows, workers=2) as loader:
            assert len(list(loader)) == 6
            parents = [
                Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[1] for each in processes_of(loader)
            ]
            assert parents == [str(os.getpid()), *[str(processes_of(loader)[0])] * 2]
    finally:
        go_on.set()
        thread.join()


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_results_lie_in_shared_memory_as_long_as_they_are_used() -> None:
    with mapped(range(50), functions.rows, workers=2) as loader:
        iterator = iter(loader)
        kept = [next(iterator) for _ in range(20)]
        used = loader.report().shared_bytes
        assert used >= 20 * (64 * 40 * 4 + 3000 * 4)
        assert loader.report().inline == 0
        expected = [digest(functions.rows(item)) for item in range(20)]
        assert [digest(each) for each in kept] == expected
        for each in iterator:
            del each
        assert [digest(each) for each in kept] == expected, "others were written over it"
        view = kept[3]["tensor"][5:]
        kept.clear()
        one = 64 * 40 * 4 + 3000 * 4  # tensor and array lie side by side
        wait_until(lambda: one <= loader.report().shared_bytes < one + 128)
    assert view.tolist() == torch.full((59, 40), 3.0).tolist()


def test_a_stage_takes_what_the_one_before_it_has_shared() -> None:
    node: Any = data.Map(IterableWrapper(range(30)), functions.rows, workers=2, name="rows")
    node = data.Map(node, functions.same, workers=2, name="same")
    with data.Loader(node, memory="2MiB") as loader:
        assert [digest(each) for each in loader] == [digest(functions.rows(item)) for item in range(30)]
        assert [stage.workers.done for stage in loader.report().stages if stage.workers] == [30, 30]


def test_a_small_memory_is_enough_whoever_keeps_results() -> None:
    """A consumer that keeps all results gets the next one beside the memory."""
    with mapped(range(40), functions.rows, workers=3, memory="128KiB") as loader:
        kept = []
        for each in loader:
            kept.append(each)
            assert loader.report().shared_bytes <= 128 * 1024
        assert [digest(each) for each in kept] == [digest(functions.rows(item)) for item in range(40)]
        assert loader.report().inline > 0


@pytest.mark.full
def test_results_that_are_not_kept_always_find_room() -> None:
    """One that the consumer uses, the next one, and what there is beside them, for results that come early."""
    for memory in ("64KiB", "128KiB", "192KiB"):  # of 2, 5 and 8 results
        with mapped(range(200), functions.rows, workers=3, memory=memory) as loader:
            iterator = iter(loader)
            kept = next(iterator)
            for _ in range(199):
                del kept
                kept = next(iterator)
            inline = loader.report().inline
            del kept
        assert inline == 0


def test_workers_that_ask_for_room_together_leave_it_for_the_next_result() -> None:
    """Eight results at once, of a memory for five: three may come early, in whatever order threads run."""
    one, interval = 2**16, sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(100):
            workshop = Workshop(5 * one)
            blocks = rooms(workshop, one, asked=8, early=3)
            assert sum(each is not None for each in blocks) == 5
            assert workshop.inline == 3
            blocks.clear()
    finally:
        sys.setswitchinterval(interval)


def rooms(workshop: Workshop, nbytes: int, *, asked: int, early: int) -> list[Any]:
    """What threads get that ask for room together: some of them early, and all once theirs is the next result."""
    is_next = threading.Event()
    blocks: list[Any] = []
    threads = [
        threading.Thread(target=lambda: blocks.append(workshop.room("rows", nbytes, is_next.is_set)))
        for _ in range(asked)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(blocks) == early)
    is_next.set()
    for thread in threads:
        thread.join()
    return blocks


def test_a_sample_larger_than_the_memory_is_told_and_the_next_one_comes() -> None:
    with mapped([100_000, 3_000_000, 100_000], functions.large, workers=2, memory="1MiB") as loader:
        iterator = iter(loader)
        assert len(next(iterator)) == 100_000
        with pytest.raises(SampleTooLarge, match="stage 'rows' has made a sample of 3000000 bytes") as caught:
            next(iterator)
        assert (caught.value.stage, caught.value.needed, caught.value.limit) == ("rows", 3_000_000, 2**20)
        assert len(next(iterator)) == 100_000


def test_workers_share_what_their_function_holds() -> None:
    """Each worker's own memory does not grow with the dataset."""
    held = torch.zeros(32 * 2**20, dtype=torch.uint8)
    with mapped(range(30), functions.Holds(held), workers=3) as loader:
        iterator = iter(loader)
        for _ in range(20):
            next(iterator)
        own = [private_bytes(each) for each in processes_of(loader)[1:]]
        assert len(own) == 3
        assert max(own) < 24 * 2**20


def private_bytes(process: int) -> int:
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


# ---- functions ------------------------------------------------------------------------------------------------------


def test_an_error_names_stage_and_sample_and_shows_the_workers_traceback() -> None:
    with mapped(range(6), functions.raises, workers=2) as loader:
        iterator = iter(loader)
        assert [next(iterator) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(
            StageFailed, match=r"(?s)'rows', sample 3: ValueError: no sample 3.*line \d+, in raises"
        ) as caught:
            next(iterator)
        assert isinstance(caught.value.__cause__, ValueError)
        with pytest.raises(StageFailed, match="CannotTravel: 4 and 4") as caught:
            next(iterator)
        assert caught.value.__cause__ is None
        assert next(iterator) == 5
        assert list(iterator) == []


@pytest.mark.parametrize("method", ["process", "thread"])
def test_items_whose_function_raises_can_be_skipped(method: Any) -> None:
    with mapped(range(20), functions.raises, workers=2, on_error="skip", method=method) as loader:
        assert list(loader) == [item for item in range(20) if item % 5 < 3]
        assert loader.report().stages[0].skipped == 8


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda item: item, "cannot be sent to workers"),
        (functions.BreaksWhenLoaded(), r"(?s)workers cannot load its function: ValueError.*In the worker"),
    ],
)
def test_a_function_that_no_worker_can_have_is_told(function: Any, said: str) -> None:
    with mapped(range(3), function) as loader, pytest.raises(InvalidStage, match=said):
        next(iter(loader))


def test_what_is_no_error_of_the_function_is_not_skipped(tmp_path: Path) -> None:
    for function, error in (
        (functions.BreaksWhenLoaded(), InvalidStage),
        (functions.Kills(tmp_path, {1}, 9), WorkersDied),
        (functions.large, SampleTooLarge),
    ):
        items = [1] if function is not functions.large else [2**21]
        with mapped(items, function, on_error="skip", memory="1MiB") as loader, pytest.raises(error):
            next(iter(loader))


def test_an_item_that_cannot_travel_is_told() -> None:
    with mapped([lambda: 1], functions.same) as loader, pytest.raises(InvalidStage, match="its item cannot be sent"):
        next(iter(loader))


SPAWNS = """
import torch.multiprocessing
from torchdata.nodes import IterableWrapper
from hydra_ext import data
def double(item):
    return 2 * item
def train(rank):
    with data.Loader(data.Map(IterableWrapper(range(3)), double, name="rows")) as loader:
        print(*loader)
if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=1)
"""


@pytest.mark.full
def test_a_spawned_training_may_have_functions_of_the_program(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SPAWNS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env=environment, check=False)
    assert (done.stdout, done.stderr) == ("0 2 4\n", "")


# ---- ends -----------------------------------------------------------------------------------------------------------


def test_a_source_that_gives_nothing_does_not_keep_a_loader_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_PATIENCE", 0.01)
    go_on = threading.Event()

    class Blocked:
        def __iter__(self) -> Any:
            yield 0
            go_on.wait()

    loader = mapped(Blocked(), functions.same, method="thread")
    assert next(iter(loader)) == 0
    loader.close()
    assert not go_on.is_set()
    go_on.set()


def test_a_loader_closes_while_a_child_of_a_worker_lives_on(tmp_path: Path) -> None:
    loader = mapped(range(2), functions.LeavesAChild(tmp_path))
    loader._root.reset()
    wait_until((tmp_path / "child").exists)
    loader.close()
    (tmp_path / "go_on").touch()
    wait_until((tmp_path / "gone").exists)


def test_a_pipeline_of_two_stages_that_is_dropped_ends() -> None:
    """The second one's thread is stopped while it waits for the first one, and is told so by an error."""
    node: Any = data.Map(IterableWrapper(itertools.count()), functions.Slow(0.01, 1), workers=2, name="slow")
    node = data.Map(node, functions.same, name="same")
    iterator = iter(data.Loader(node, memory="1MiB"))
    del node
    for _ in range(5):
        next(iterator)
    threads = [each for each in threading.enumerate() if each.name.startswith("hydra_ext")]
    assert len(threads) >= 4
    del iterator
    gc.collect()
    wait_until(lambda: not any(thread.is_alive() for thread in threads))


def test_a_loader_that_is_dropped_behind_an_error_ends() -> None:
    loader = mapped(range(9), functions.raises, workers=2)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    with pytest.raises(StageFailed):
        next(iterator)
    processes = processes_of(loader)
    del loader, iterator
    gc.collect()
    wait_until(lambda: not any(map(alive, processes)))


def test_a_loader_that_another_thread_closes_tells_so() -> None:
    go_on = threading.Event()

    class Blocked:
        def __iter__(self) -> Any:
            go_on.wait()
            yield 0

    loader = mapped(Blocked(), functions.same, method="thread")
    iterator = iter(loader)
    closer = threading.Timer(0.05, lambda: (loader.close(), None)[1])
    closer.start()
    with pytest.raises(StateError, match=r"was stopped|has ended"):
        next(iterator)
    go_on.set()
    closer.join()


OWN_FUNCTION = """
import sys
from torchdata.nodes import IterableWrapper
from hydra_ext import data
def double(item):
    return 2 * item
def run():
    with data.Loader(data.Map(IterableWrapper(range(3)), double, name="rows")) as loader:
        print(*loader)
"""


@pytest.mark.every_case
@pytest.mark.parametrize("is_guarded", [True, False])
def test_functions_of_the_program_itself_need_a_guard(is_guarded: bool, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(OWN_FUNCTION + ('if __name__ == "__main__":\n    run()' if is_guarded else "run()"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env=environment, check=False)
    if is_guarded:
        assert (done.stdout, done.stderr) == ("0 2 4\n", "")
    else:
        assert done.stderr.strip().count("InvalidStage: stage 'rows': workers cannot load its function: ") == 1
        assert "put what it runs under if __name__ == '__main__':" in done.stderr


def test_a_source_that_raises_raises_for_the_consumer() -> None:
    def source() -> Any:
        yield 0
        raise ValueError("no more")

    class Broken:
        def __iter__(self) -> Any:
            return source()

    with mapped(Broken(), functions.same) as loader:
        iterator = iter(loader)
        assert next(iterator) == 0
        for _ in range(2):
            with pytest.raises(ValueError, match="no more"):
                next(iterator)


def test_a_workshop_that_was_closed_starts_nothing() -> None:
    workshop = Workshop(2**20)
    stage = workshop.load("rows", functions.rows)
    workshop.close()
    with pytest.raises(Exception, match="have been closed"):
        workshop.start(stage)
    assert workshop.processes == []
