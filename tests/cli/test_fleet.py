"""`fleet`: says what a fleet is doing, watches it, writes its report; refuses with the reason."""

import fcntl
import json
import os
import sys
from pathlib import Path

import pytest

from hydra_ext.cli import fleet, main
from support import fleet_folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fleet_folders.eventful(tmp_path)
    return tmp_path


def test_it_prints_a_table_and_says_that_the_fleet_does_not_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["fleet", "status", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{folder}: 2 of 4 jobs have ended after 18 s; the fleet does not run")
    assert [line.split()[0] for line in lines[1:6]] == ["job", "a", "b", "c", "d"]


def test_it_prints_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["fleet", "status", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["eta_seconds"]) == ("stopped", None)
    assert {job["name"]: job["step"] for job in found["jobs"]} == {"a": 10, "b": 6, "c": 0, "d": 0}


@pytest.mark.every_case
@pytest.mark.parametrize("arguments", [["status", "FOLDER"], ["report", "FOLDER", "--html", "FOLDER/x.html"]])
def test_a_folder_without_a_fleet_ends_with_2(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["fleet", *(each.replace("FOLDER", str(tmp_path)) for each in arguments)]) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path} holds no fleet")
    assert not list(tmp_path.iterdir())


def test_it_writes_the_report_or_says_why_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["fleet", "report", str(folder), "--html", str(folder / "report.html")]) == 0
    assert capsys.readouterr().out == f"the report is in {folder / 'report.html'}\n"
    assert "</html>" in (folder / "report.html").read_text()
    assert main.run(["fleet", "report", str(folder), "--html", "/nowhere/at/all"]) == 1
    assert "the report cannot be written to '/nowhere/at/all'" in capsys.readouterr().err


@pytest.mark.every_case
@pytest.mark.parametrize("as_json", [False, True])
def test_it_watches_until_the_fleet_ends(
    as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = fleet_folders.eventful(tmp_path)
    descriptor = os.open(tmp_path / "workers.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    looks = []

    def go_on(seconds: float) -> None:
        """In place of a sleep: the fleet goes on meanwhile."""
        looks.append(seconds)
        if len(looks) == 2:
            written.progress(18.5, "b", 15, "step", 9, loss=0.125, seconds=0.5)
        if len(looks) == 3:
            written.note("finished", 30.0)

    monkeypatch.setattr(fleet.time, "sleep", go_on)
    assert main.run(["fleet", "status", str(tmp_path), "--watch", *(["--json"] if as_json else [])]) == 0
    os.close(descriptor)
    out = capsys.readouterr().out
    assert len(looks) == 3
    if as_json:
        found = [json.loads(line) for line in out.splitlines()]
        assert [status["state"] for status in found] == ["running"] * 3 + ["finished"]
        assert [status["jobs"][1]["step"] for status in found] == [
            8,
            8,
            9,
            6,
        ]  # at last without steps since the checkpoint
    else:
        assert out.count("jobs have ended") == 3  # the second look has seen nothing new
        assert "the fleet has finished" in out


def test_in_a_terminal_it_draws_by_rich(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main.run(["fleet", "status", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "┃" in out
    assert "technique" in out
    assert "c: ValueError: <no> such data" in out


def test_in_a_terminal_without_rich_it_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.live", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main.run(["fleet", "status", str(folder)]) == 1
    assert "pip install 'hydra-ext[live]'" in capsys.readouterr().err
    assert main.run(["fleet", "status", str(folder), "--json"]) == 0


def test_ctrl_c_ends_the_watching(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fleet.time, "sleep", interrupt)
    with (folder / "workers.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main.run(["fleet", "status", str(folder), "--watch"]) == 0
    assert "the fleet runs" in capsys.readouterr().out
