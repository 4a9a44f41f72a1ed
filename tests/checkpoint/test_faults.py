"""Every operation on files fails once: the checkpoint before stays, the run goes on, and the next save works."""

from __future__ import annotations

import errno
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hydra_ext.checkpoint.format import writer
from hydra_ext.checkpoint.format.files import Files
from hydra_ext.checkpoint.verifying import verify
from hydra_ext.errors import CheckpointError, SaveFailed
from support.checkpoint.checkpoints import Small, small_states
from support.checkpoint.faulty_files import ERRORS, CountingFiles, FailingFiles, PowerLossFiles, PowerLost

KEEP = 2
# By default some operations only, others for each error; with the mark every one.
EVERY = [4, pytest.param(1, marks=pytest.mark.full)]

EXPECTED = small_states(4)


@pytest.fixture(autouse=True, scope="module")
def _shards() -> Iterator[None]:
    """Several files of every kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "SHARD_BYTES", 40)
        yield


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, of steps 1 and 2, and what a killed save has left."""
    folder = tmp_path_factory.mktemp("begun") / "ckpt"
    with Small() as small:
        for _ in range(2):
            small.step()
            small.run.save(folder)
        small.step()
        small.run._checkpoint.files = PowerLossFiles(folder, 60)
        with pytest.raises(PowerLost):
            small.run.save(folder)
    assert (folder / "step-00000003" / "manifest.json.unfinished").exists()
    return folder


def resumed(small: Small, folder: Path) -> int:
    """The step that the newest checkpoint is of; all of it is right."""
    loaded = small.run.load(folder)
    if loaded is None:
        return 0
    assert loaded.step == small.run.steps
    assert all(map(torch.equal, small.state(), EXPECTED[loaded.step]))
    return loaded.step


def after_failure(folder: Path, allowed: tuple[int, ...]) -> None:
    """Something whole is there, and a retry makes step 3 of it, and leaves nothing else."""
    assert [v for v in verify(folder) if v.state == "damaged"] == [] if folder.exists() else True
    with Small() as small:
        small.run._checkpoint.files = CountingFiles()
        step = resumed(small, folder)
        assert step in allowed
        while small.run.steps < 3:
            small.step()
        small.run.save(folder, keep=KEEP)
    with Small() as small:
        assert resumed(small, folder) == 3
    found = verify(folder)
    assert {v.state for v in found} == {"whole"}
    assert len(found) <= KEEP
    assert {path.name for path in folder.iterdir()} == {v.path.name for v in found}


WAYS = [("EIO", False), ("EIO", True), ("ENOSPC", False), ("short", False)]


@pytest.mark.cases(1)
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("way", range(len(WAYS)), ids=lambda way: str(WAYS[way]))
def test_a_save_whose_nth_operation_fails(way: int, every: int, begun: Path, tmp_path: Path) -> None:
    error, lasting = WAYS[way]
    failures = []
    for n in itertools.count(1 + way % every, every):
        folder = tmp_path / str(n)
        shutil.copytree(begun, folder)
        with Small() as small:
            assert resumed(small, folder) == 2
            small.step()
            files = small.run._checkpoint.files = FailingFiles(n, ERRORS[error], lasting=lasting)
            saved = False
            try:
                small.run.save(folder, keep=KEEP)
                saved = True
            except SaveFailed as failure:
                failures.append((error, failure.path == folder))
            if not files.failed:
                break
            small.run._checkpoint.files = Files()
            assert small.run.steps == 3
            assert all(map(torch.equal, small.state(), EXPECTED[3]))  # the run itself is as it was
        # A disk that does nothing any more after the rename cannot take it back: the checkpoint is there, and whole.
        renamed = lasting and "rename" in files.done[: n - 1]
        after_failure(folder, (3,) if saved or renamed else (2,))
        shutil.rmtree(folder)
    assert n > 50
    assert set(failures) == (set() if error == "short" else {(error, True)})


@pytest.mark.cases(1)
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
def test_a_first_save_whose_nth_operation_fails(error: str, every: int, tmp_path: Path) -> None:
    for n in itertools.count(1, every):
        folder = tmp_path / str(n) / "made" / "ckpt"
        with Small() as small:
            for _ in range(3):
                small.step()
            files = small.run._checkpoint.files = FailingFiles(n, ERRORS[error])
            try:
                small.run.save(folder)
                step = 3
            except SaveFailed:
                step = 0
            if not files.failed:
                break
        after_failure(folder, (step,))
    assert n > 50


def test_reads_and_writes_that_are_all_cut_short_are_gone_on_with(tmp_path: Path) -> None:
    with Small() as small:
        small.step()
        files = small.run._checkpoint.files = FailingFiles(1, None, lasting=True)
        small.run.save(tmp_path)
        assert files.done.count("write") > 1000
        small.step()
        assert resumed(small, tmp_path) == 1
        assert files.done.count("read") > 1000


def test_an_fsync_that_fails_is_not_tried_again(tmp_path: Path) -> None:
    with Small() as small:
        small.run._checkpoint.files = counted = CountingFiles()
        small.run.save(tmp_path / "all")
        syncs = [n for n, name in enumerate(counted.done, 1) if name == "sync"]
        for number, n in enumerate(syncs, 1):
            files = small.run._checkpoint.files = FailingFiles(n, errno.EIO)
            with pytest.raises(SaveFailed):
                small.run.save(tmp_path / str(n))
            # What is synced afterwards is the removal's, never the checkpoint's.
            assert files.done[:n].count("sync") == number
            assert not list((tmp_path / str(n)).glob("*/manifest.json"))


@pytest.mark.cases(1)
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("code", [errno.EIO, None])
def test_a_load_whose_nth_operation_fails(code: int | None, every: int, begun: Path) -> None:
    failures, whole = [], 0
    for n in itertools.count(1, every):
        with Small() as small:
            for _ in range(4):
                small.step()
            files = small.run._checkpoint.files = FailingFiles(n, code)
            try:
                assert resumed(small, begun) == 2
            except CheckpointError as failure:
                failures.append((code, failure.file.is_relative_to(begun)))
                if "partly" not in str(failure):
                    whole += 1
                    assert all(map(torch.equal, small.state(), EXPECTED[4]))
                    assert small.run.steps == 4
            if not files.failed:
                break
            small.run._checkpoint.files = Files()
            assert resumed(small, begun) == 2
    assert n > 50
    assert set(failures) == (set() if code is None else {(code, True)})
    assert (whole > 30 / every) == (code is not None)


# Where only some names are left, every operation: that a folder was not synced is seen behind one of them alone.
LEFT = [
    ("some", 12),
    ("safe", 4),
    ("now", 4),
    *(pytest.param(names, 1, marks=pytest.mark.full) for names in ("some", "safe", "now")),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("names", "every"), LEFT)
def test_power_is_lost_at_the_nth_operation(names: str, every: int, begun: Path, tmp_path: Path) -> None:
    for n in itertools.count(1, every):
        folder, left = tmp_path / f"{n}", tmp_path / f"{n}-left"
        shutil.copytree(begun, folder)
        with Small() as small:
            assert resumed(small, folder) == 2
            small.step()
            files = small.run._checkpoint.files = PowerLossFiles(folder, n)
            saved = False
            try:
                small.run.save(folder, keep=KEEP)
                saved = True
            except PowerLost:
                pass
        for seed in range(4 if names == "some" else 1):
            files.leave(left, names=names, seed=seed)
            after_failure(left, (3,) if saved else (2, 3))
            shutil.rmtree(left)
        if saved and len(files.done) < n:
            break
        shutil.rmtree(folder)
    assert n > 50


@pytest.mark.parametrize("every", EVERY)
def test_power_is_lost_in_the_first_save(every: int, tmp_path: Path) -> None:
    for n in itertools.count(1, every):
        around, left = tmp_path / f"{n}", tmp_path / f"{n}-left"
        around.mkdir()
        with Small() as small:
            for _ in range(3):
                small.step()
            files = small.run._checkpoint.files = PowerLossFiles(around, n)
            saved = False
            try:
                small.run.save(around / "ckpt")
                saved = True
            except PowerLost:
                pass
        files.leave(left, names="safe")
        after_failure(left / "ckpt", (3,) if saved else (0, 3))
        if saved:
            break
    assert n > 30
