"""`verify`: says of each checkpoint in a folder whether it is whole."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import hydra_ext
from hydra_ext.cli import main
from support.checkpoint import damaged


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with hydra_ext.offload(nn.Linear(8, 8), budget="1MiB") as run:
        for _ in range(3):
            run.save(tmp_path, keep=3)
    return tmp_path


def test_it_lists_them_oldest_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = (folder / "step-00000000" / "model.safetensors").stat().st_size
    assert main.run(["verify", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"step-00000000  whole  step 0, {size} bytes",
        f"step-00000000-2  whole  step 0, {size} bytes",
        f"step-00000000-3  whole  step 0, {size} bytes  (the newest)",
    ]
    assert main.run(["verify", str(folder / "step-00000000-2")]) == 0
    assert capsys.readouterr().out == f"step-00000000-2  whole  step 0, {size} bytes\n"


def test_it_says_what_is_damaged_and_what_was_never_finished(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "step-00000000-2" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    data[-40] ^= 1
    file.write_bytes(data)
    (folder / "step-00000000-3" / "manifest.json").rename(folder / "step-00000000-3" / "manifest.json.unfinished")
    damaged.cut("manifest.json", 5)(folder / "step-00000000")
    (folder / "step-00000007").mkdir()
    assert main.run(["verify", str(folder), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["good"] is False
    states = {Path(each["path"]).name: each["state"] for each in found["checkpoints"]}
    assert states == {
        "step-00000000": "damaged",
        "step-00000000-2": "damaged",
        "step-00000000-3": "unfinished",
        "step-00000007": "foreign",
    }
    by_name = {Path(each["path"]).name: each for each in found["checkpoints"]}
    assert [fault["tensor"] for fault in by_name["step-00000000-2"]["faults"]] == ["weight", "bias"]
    assert [fault["file"] for fault in by_name["step-00000000"]["faults"]] == [
        str(folder / "step-00000000" / "manifest.json")
    ]
    assert [name for name, each in by_name.items() if each["newest"]] == ["step-00000000-2"]
    assert main.run(["verify", str(folder)]) == 1
    assert "    " + by_name["step-00000000-2"]["faults"][0]["message"] in capsys.readouterr().out.splitlines()


def test_what_killed_saves_have_left_is_no_damage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "step-00000000-3" / "manifest.json").rename(folder / "step-00000000-3" / "manifest.json.unfinished")
    assert main.run(["verify", str(folder)]) == 0
    assert "step-00000000-3  unfinished\n" in capsys.readouterr().out


def test_what_somebody_is_saving_now_is_under_way(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "step-00000000-3" / "manifest.json").rename(folder / "step-00000000-3" / "manifest.json.unfinished")
    (folder / "step-00000007").mkdir()
    (folder / "step-00000008").mkdir()
    (folder / "step-00000008" / "notes.txt").write_text("mine")
    saving = os.open(folder, os.O_RDONLY)
    fcntl.flock(saving, fcntl.LOCK_EX)
    assert main.run(["verify", str(folder)]) == 0
    os.close(saving)
    states = dict(line.split("  ")[:2] for line in capsys.readouterr().out.splitlines())
    assert states == {
        "step-00000000": "whole",
        "step-00000000-2": "whole",
        "step-00000000-3": "under way",
        "step-00000007": "under way",
        "step-00000008": "foreign",
    }


def test_a_folder_without_any_and_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["verify", str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"there is no checkpoint in {tmp_path}\n"
    assert main.run(["verify", str(tmp_path / "none")]) == 1
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.full
def test_it_runs_as_a_module(folder: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "hydra_ext", "verify", str(folder), "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout)
    assert [each["serial"] for each in found["checkpoints"]] == [1, 2, 3]
