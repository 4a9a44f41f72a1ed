"""Checkpoints are read while another process saves into their folder: what is read is whole, and of one time."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext.checkpoint import loading, verifying
from hydra_ext.checkpoint.folder import Folder
from hydra_ext.checkpoint.format import files as files_module
from hydra_ext.checkpoint.format import writer
from hydra_ext.checkpoint.format.files import Files
from hydra_ext.checkpoint.verifying import verify
from hydra_ext.construction import weight_files
from hydra_ext.construction.recipes import fill
from hydra_ext.errors import CheckpointRemoved, CheckpointsInUse, TooManyFiles, WeightsError
from support.checkpoint.checkpoints import Small
from support.checkpoint.faulty_files import CountingFiles
from support.checkpoint.saving_beside import InterruptedFiles, numbered, saver

LOADS = 200


@pytest.fixture(autouse=True, scope="module")
def _shards() -> Iterator[None]:
    """Several files of every kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "SHARD_BYTES", 40)
        yield


class Saver:
    """Saves, and knows what it has saved.

    Attributes:
        states: by step.
    """

    def __init__(self, small: Small, folder: Path, keep: int = 1) -> None:
        self.states: dict[int, list[torch.Tensor]] = {}
        self._small = small
        self._folder = folder
        self._keep = keep
        small.run._checkpoint.files = CountingFiles()  # syncs nothing

    def save(self) -> None:
        self._small.step()
        self.states[self._small.run.steps] = self._small.state()
        self._small.run.save(self._folder, keep=self._keep)


def discard(folder: Path, name: str) -> None:
    files = Files()
    descriptor = files.open_folder(folder)
    Folder(folder, files, descriptor).discard(name)
    files.close(descriptor)


def model_of(small: Small) -> list[torch.Tensor]:
    return list(small.model.state_dict().values())


@pytest.mark.full
@pytest.mark.parametrize("strict", [True, False])
def test_a_run_is_loaded_whole_whenever_another_saves(strict: bool, tmp_path: Path) -> None:
    with Small() as theirs, Small() as ours:
        saving = Saver(theirs, tmp_path)
        saving.save()
        for n in itertools.count(1):
            newest = theirs.run.steps
            files = ours.run._checkpoint.files = InterruptedFiles(n, saving.save)
            loaded = ours.run.load(tmp_path, strict=strict)
            assert loaded is not None
            assert loaded.step in (newest, theirs.run.steps)
            assert all(map(torch.equal, ours.state(), saving.states[loaded.step]))
            if not files.interrupted:
                break
    assert n > 50


def test_a_model_is_loaded_whole_whenever_another_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Small() as theirs, Small() as ours:
        saving = Saver(theirs, tmp_path)
        saving.save()
        for n in itertools.count(1):
            newest = theirs.run.steps
            files = InterruptedFiles(n, saving.save)
            monkeypatch.setattr(loading, "Files", lambda files=files: files)
            loaded = hydra_ext.load_model(tmp_path, ours.model)
            assert loaded.step in (newest, theirs.run.steps)
            assert all(map(torch.equal, model_of(ours), saving.states[loaded.step]))
            if not files.interrupted:
                break
    assert n > 30


@pytest.mark.full
@pytest.mark.parametrize("keep", [1, 2])
def test_nothing_is_found_damaged_whenever_another_saves(
    keep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Small() as theirs:
        saving = Saver(theirs, tmp_path, keep)
        for _ in range(keep):
            saving.save()
        for n in itertools.count(1):
            newest = theirs.run.steps
            files = InterruptedFiles(n, saving.save)
            monkeypatch.setattr(verifying, "Files", lambda files=files: files)
            found = verify(tmp_path)
            assert {verdict.state for verdict in found} == {"whole"}
            assert [verdict.newest for verdict in found].count(True) == 1
            assert found[-1].newest
            assert found[-1].step in (newest, theirs.run.steps)
            if not files.interrupted:
                break
    assert n > 30


def test_readers_come_at_every_moment_of_a_save(tmp_path: Path) -> None:
    """The first save is not seen before it is whole; afterwards there is always a whole one."""
    seen: set[str] = set()
    with Small() as theirs, Small() as ours:
        saving = Saver(theirs, tmp_path)

        def look() -> None:
            states = {verdict.state for verdict in verify(tmp_path)} if tmp_path.exists() else set()
            seen.update(states)
            loaded = ours.run.load(tmp_path)
            assert ("whole" in states) == (loaded is not None)
            if loaded is not None:
                assert all(map(torch.equal, ours.state(), saving.states[loaded.step]))
            elif len(saving.states) > 1:
                pytest.fail("there is a checkpoint, and it was not found")

        for _ in range(3):
            theirs.run._checkpoint.files = InterruptedFiles(None, look)
            saving.save()
        assert {verdict.state for verdict in verify(tmp_path)} == {"whole"}
    assert seen == {"whole", "under way"}


@pytest.mark.full
def test_one_that_was_removed_is_not_taken_for_a_folder_without_any(tmp_path: Path) -> None:
    """A caller that named one gets it or an error: another one would not be what was asked for."""
    with Small() as theirs, Small() as ours:
        Saver(theirs, tmp_path / "made").save()
        made = next((tmp_path / "made").iterdir())
        ours.step()
        before, heard = ours.state(), []
        for n in itertools.count(3):  # which is when it was seen to be a checkpoint
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(made, copy / made.name)

            files = ours.run._checkpoint.files = InterruptedFiles(n, partial(discard, copy, made.name))
            try:
                loaded = ours.run.load(copy / made.name)
            except CheckpointRemoved as error:
                heard.append((str(error).partition(" was removed ")[0], all(map(torch.equal, ours.state(), before))))
                continue
            assert loaded is not None
            assert all(map(torch.equal, ours.state(), theirs.state()))
            if not files.interrupted:
                break
            ours.step()
            before = ours.state()
    assert len(heard) > 10
    assert set(heard) == {(str(copy / made.name), True)}


def test_weights_of_one_that_was_removed_are_all_there_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hydra_ext.offload(numbered(3), budget=2**20) as run:
        run.save(tmp_path)
    made = next(tmp_path.iterdir())
    opened, heard = weight_files._opened, 0
    for n in itertools.count(1):
        copy, left = tmp_path / f"copy-{n}", itertools.count(n, -1)
        shutil.copytree(made, copy / made.name)

        def removed(file: Path, copy: Path = copy, left: Iterator[int] = left) -> object:
            if next(left) == 1:
                discard(copy, made.name)
            return opened(file)

        monkeypatch.setattr(weight_files, "_opened", removed)
        model = None
        try:
            model = hydra_ext.materialize(lambda: numbered(0), weights=copy / made.name)
            fill(model)
        except WeightsError:
            heard += 1
            assert model is None or all(parameter.is_meta for parameter in model.parameters())
            continue
        assert all(bool((parameter == 3).all()) for parameter in model.parameters())
        break
    assert heard > 6


def test_too_many_files_are_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Few(Files):
        opened = 0

        def open(self, name: str, *, inside: int) -> int:
            self.opened += 1
            if self.opened > 5:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().open(name, inside=inside)

    with Small() as theirs, Small() as ours:
        Saver(theirs, tmp_path).save()
        before = ours.state()
        for strict in (True, False):
            ours.run._checkpoint.files = Few()
            with pytest.raises(TooManyFiles, match=r"ulimit -Hn"):
                ours.run.load(tmp_path, strict=strict)
        assert all(map(torch.equal, ours.state(), before))
        monkeypatch.setattr(verifying, "Files", Few)
        with pytest.raises(TooManyFiles, match=r"ulimit -Hn"):
            verify(tmp_path)


@contextmanager
def few_descriptors() -> Iterator[None]:
    """Five more can be open: those of two folders, and of three files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    free = (number for number in range(hard) if number not in used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, 5, None)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("read", ["load", "load_model", "verify"])
def test_more_files_than_the_soft_limit_are_read(read: str, tmp_path: Path) -> None:
    with Small() as theirs, Small() as ours:
        Saver(theirs, tmp_path).save()
        with few_descriptors():
            before = resource.getrlimit(resource.RLIMIT_NOFILE)
            if read == "load":
                assert ours.run.load(tmp_path) is not None
            elif read == "load_model":
                assert hydra_ext.load_model(tmp_path, ours.model).step == 1
            else:
                assert [verdict.state for verdict in verify(tmp_path)] == ["whole"]
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    with Small() as theirs, Small() as ours:
        Saver(theirs, tmp_path).save()
        before = sorted(os.listdir("/proc/self/fd"))
        ours.run.load(tmp_path, strict=False)
        verify(tmp_path)
        assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_look_whether_another_saves_stops_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looking = os.open(tmp_path, os.O_RDONLY)
    flock = fcntl.flock
    tries = itertools.count()

    def looked(folder: int, how: int) -> None:
        if how & fcntl.LOCK_EX and next(tries) == 2:
            flock(looking, fcntl.LOCK_UN)
        flock(folder, how)

    flock(looking, fcntl.LOCK_SH | fcntl.LOCK_NB)
    monkeypatch.setattr(files_module.fcntl, "flock", looked)
    with Small() as theirs:
        Saver(theirs, tmp_path).save()
        flock(looking, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(CheckpointsInUse):
            theirs.run.save(tmp_path)
    os.close(looking)
    assert [verdict.state for verdict in verify(tmp_path)] == ["whole"]


def test_one_of_two_savers_does_not_wait_for_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one comes while this one has found that the folder is only looked at."""
    looking, one, other = (os.open(tmp_path, os.O_RDONLY) for _ in range(3))
    flock = fcntl.flock
    locked: list[bool] = []

    def meanwhile(folder: int, how: int) -> None:
        assert how == fcntl.LOCK_UN or how & fcntl.LOCK_NB, "it waits"
        flock(folder, how)
        if (folder, how) == (one, fcntl.LOCK_UN):
            flock(looking, fcntl.LOCK_UN)
            locked.append(Files().lock(other))

    flock(looking, fcntl.LOCK_SH | fcntl.LOCK_NB)
    monkeypatch.setattr(files_module.fcntl, "flock", meanwhile)
    locked.append(Files().lock(one))
    assert locked == [True, False]
    for descriptor in (looking, one, other):
        os.close(descriptor)


@pytest.mark.full
def test_another_process_saves_without_end(tmp_path: Path) -> None:
    model = numbered(-1)
    with hydra_ext.offload(numbered(-1), budget=2**20) as run, saver(tmp_path):
        readers: list[tuple[nn.Module, Callable[[], object]]] = [
            (model, lambda: hydra_ext.load_model(tmp_path, model)),
            (run.model, lambda: run.load(tmp_path)),
        ]
        numbers = []
        for _, (module, load) in zip(range(LOADS), itertools.cycle(readers), strict=False):
            loaded = load()
            assert isinstance(loaded, loading.Loaded)
            numbers.append(loaded.extra)
            assert all(bool((parameter == loaded.extra).all()) for parameter in module.parameters())
            found = {verdict.state for verdict in verify(tmp_path)}
            assert "whole" in found
            assert found <= {"whole", "under way"}
    assert numbers == sorted(numbers)
    assert numbers[0] < numbers[-1]
