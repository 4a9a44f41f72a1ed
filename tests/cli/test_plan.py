"""`plan`: solves a problem of a file, and prints the plan as JSON or as text."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hydra_ext.cli import main

PROBLEM = {
    "num_blocks": 24,
    "num_workers": 4,
    "memory_capacity": 16e9,
    "computation_time_per_block": 0.001,
    "num_parameters_per_block": 10_000_000,
    "num_activations_per_block": 10_000_000,
    "output_activation_size": 1_000_000,
}
PLAN = {"objective": 24 * 0.001 / 4, "plan": [1, 4], "bound": 24 * 0.001 / 4, "gap": 0.0}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(PROBLEM))
    return path


def plan(file: Any, *more: str, kind: str = "width_depth") -> int:
    return main.run(["plan", "--kind", kind, "--problem", str(file), *more])


def test_it_prints_nothing_but_the_plan_as_json(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert plan(file, "--json") == 0
    shown = capfd.readouterr()
    assert json.loads(shown.out) == PLAN
    assert list(json.loads(shown.out)) == ["objective", "plan", "bound", "gap"]
    assert shown.out.count("\n") == 1
    assert shown.err == ""


def test_without_json_it_prints_text(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(file) == 0
    assert capsys.readouterr().out == "objective 0.006, proved to be the best\n1\n4\n"


def test_a_problem_that_nothing_fits_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.json"
    file.write_text(json.dumps({**PROBLEM, "memory_capacity": 1}))
    assert plan(file, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"objective": None, "plan": None, "bound": None, "gap": None}
    assert plan(file) == 0
    assert capsys.readouterr().out == "no plan fits into the memory\n"


def test_it_reads_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(PROBLEM).encode())))
    assert plan("-", "--json") == 0
    assert json.loads(capsys.readouterr().out) == PLAN


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no JSON"),
        (b"{", "is no JSON"),
        (b"\xff\xfe\x00", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b"[1]", "is a list: give an object"),
        (b"{}", "problem has no 'num_blocks': add it; there are no entries"),
        (json.dumps({**PROBLEM, "num_workers": -4}).encode(), "problem['num_workers'] is -4: give a whole number"),
        (json.dumps({**PROBLEM, "memory_capacity": float("nan")}).encode(), "is nan: give a finite number"),
    ],
)
def test_a_bad_problem_is_refused_on_standard_error(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    assert plan(file, "--json") == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err


def test_a_missing_file_and_an_unknown_kind_are_refused(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(tmp_path / "none.json") == 2
    assert "none.json cannot be read" in capsys.readouterr().err
    assert plan(file, kind="width") == 2
    assert "kind='width' is not known: give one of chain" in capsys.readouterr().err
