"""Folders of checkpoints: which can be saved into, and what is in them besides."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import ClassVar

import pytest

import hydra_ext
from hydra_ext.checkpoint.format import manifest
from hydra_ext.checkpoint.format.files import Files
from hydra_ext.errors import CheckpointError, CheckpointsInUse, SaveFailed
from support.checkpoint import damaged
from support.checkpoint.checkpoints import backward, small
from support.runtime.leaving import beside


def test_a_checkpoint_is_no_folder_of_checkpoints(run: hydra_ext.Run, tmp_path: Path) -> None:
    """``run.load`` would go on finding what is there."""
    path = run.save(tmp_path)
    before = sorted(path.iterdir())
    with pytest.raises(SaveFailed, match="it is a checkpoint itself") as error:
        run.save(path)
    assert error.value.path == path
    assert sorted(path.iterdir()) == before
    assert run.load(path) is not None


def test_a_disk_without_room_is_noticed_before_anything_is_written(run: hydra_ext.Run, tmp_path: Path) -> None:
    class Full(Files):
        def free_bytes(self, folder: int) -> int:
            return 100

    run.save(tmp_path)
    run._checkpoint.files = Full()
    with pytest.raises(SaveFailed, match="100 bytes are free") as caught:
        run.save(tmp_path)
    assert (caught.value.path, caught.value.free_bytes) == (tmp_path, 100)
    assert caught.value.needed_bytes > 40
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]


def test_what_no_reader_would_take_is_not_saved(
    run: hydra_ext.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run.save(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "LONGEST", (first / "manifest.json").stat().st_size - 1)
        with pytest.raises(SaveFailed, match="is longer than"):
            run.save(tmp_path, extra="more")
    damaged.top(serial=2**63 - 1)(first)
    with pytest.raises(SaveFailed, match="serial is not a count"):
        run.save(tmp_path)
    assert list(tmp_path.iterdir()) == [first]


def test_the_folder_around_may_be_closed_to_us(run: hydra_ext.Run, tmp_path: Path) -> None:
    class Closed(Files):
        def open_folder(self, path: Path) -> int:
            if path == tmp_path:
                raise PermissionError("closed")
            return super().open_folder(path)

    (tmp_path / "ckpt").mkdir()
    run._checkpoint.files = Closed()
    run.save(tmp_path / "ckpt")
    with pytest.raises(SaveFailed, match="closed"):
        run.save(tmp_path / "new")


def test_two_jobs_cannot_save_into_one_folder_at_once(run: hydra_ext.Run, tmp_path: Path) -> None:
    entered, leave = threading.Event(), threading.Event()

    class Slow(Files):
        def lock(self, folder: int) -> bool:
            locked = super().lock(folder)
            entered.set()
            leave.wait(60)
            return locked

    other = small()
    with hydra_ext.offload(other, budget="1MiB") as second:
        second._checkpoint.files = Slow()
        with beside(lambda: second.save(tmp_path), until=leave):
            assert entered.wait(60)
            with pytest.raises(CheckpointsInUse, match="another process is saving"):
                run.save(tmp_path)
    run.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_what_is_not_ours_stays(run: hydra_ext.Run, tmp_path: Path) -> None:
    foreign = tmp_path / "step-00000007"
    foreign.mkdir()
    (foreign / "model.safetensors").write_text("foreign")
    (tmp_path / "step-00000008").symlink_to(foreign)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-00000009").mkdir()  # empty
    first = run.save(tmp_path, keep=1)
    (first / "notes.txt").write_text("mine")
    (first / "deep").mkdir()
    (first / "deep" / "model.safetensors").write_text("mine")
    run.save(tmp_path, keep=1)
    run.save(tmp_path, keep=1)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.name != "manifest.json"}
    assert left == {
        "notes.txt",
        "step-00000000",
        "step-00000000/deep",
        "step-00000000/deep/model.safetensors",
        "step-00000000/notes.txt",
        "step-00000000-3",
        "step-00000000-3/model.safetensors",
        "step-00000007",
        "step-00000007/model.safetensors",
        "step-00000008",
    }


def test_a_step_that_is_a_link_is_not_followed(run: hydra_ext.Run, tmp_path: Path) -> None:
    step = run.save(tmp_path / "run")
    elsewhere = step.rename(tmp_path / "elsewhere")
    step.symlink_to(elsewhere)
    with pytest.raises(CheckpointError):
        run.load(tmp_path / "run")
    assert run.load(elsewhere) is not None  # the caller's own path


def test_a_manifest_that_cannot_be_closed_makes_no_checkpoint(run: hydra_ext.Run, tmp_path: Path) -> None:
    class Failing(Files):
        mark = -1
        seen: ClassVar[list[str]] = []

        def create(self, name: str, *, inside: int) -> int:
            file = super().create(name, inside=inside)
            self.mark = file if name == manifest.UNFINISHED else self.mark
            return file

        def close(self, file: int) -> None:
            super().close(file)
            if file == self.mark:
                self.mark = -1
                raise OSError(errno.EIO, "the disk is gone")

        def rename(self, old: str, new: str, *, inside: int) -> None:
            self.seen.append(new)
            super().rename(old, new, inside=inside)

    run._checkpoint.files = Failing()
    with pytest.raises(SaveFailed, match="the disk is gone"):
        run.save(tmp_path)
    assert Failing.seen == []
    assert not list(tmp_path.iterdir())


def test_an_earlier_step_that_is_saved_later_is_the_newest(run: hydra_ext.Run, tmp_path: Path) -> None:
    for _ in range(3):
        backward(run)
        run.optimizer.step()
        run.save(tmp_path, keep=5)
    run.load(tmp_path / "step-00000001")
    assert run.steps == 1
    again = run.save(tmp_path, keep=2)
    assert again.name == "step-00000001-2"
    assert run.load(tmp_path).path == again
    assert sorted(os.listdir(tmp_path)) == ["step-00000001-2", "step-00000003"]


@pytest.mark.parametrize("name", ["", "manifest.json", "model.safetensors"])
def test_a_link_is_not_followed_to_a_checkpoint_or_to_a_part_of_one(
    run: hydra_ext.Run, name: str, tmp_path: Path
) -> None:
    """Where it leads may be another user's, and something else by the time it is read."""
    backward(run)
    assert run.optimizer is not None
    run.optimizer.step()
    path = run.save(tmp_path / "ckpt")
    linked, elsewhere = path / name if name else path, tmp_path / "elsewhere"
    linked.rename(elsewhere)
    linked.symlink_to(elsewhere)
    with pytest.raises(CheckpointError):
        run.load(tmp_path / "ckpt")
    linked.unlink()
    elsewhere.rename(linked)
    loaded = run.load(tmp_path / "ckpt")
    assert loaded is not None
    assert loaded.path == path
