"""What the command says of itself, and of errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import hydra_ext
from hydra_ext import _build_info
from hydra_ext.cli import main


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == f"hydra-ext {hydra_ext.__version__}, built for torch {_build_info.TORCH}\n"


def test_the_help_has_the_verbs_and_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([]) == 0
    printed = capsys.readouterr().out
    assert "--version" in printed
    assert all(verb in printed for verb in main.VERBS)


@pytest.mark.parametrize(
    ("budget", "said"), [("20KiB", "cannot hold the largest block"), ("much", "much"), ("600KiB", "out of memory")]
)
def test_a_budget_that_cannot_work_is_told_without_a_traceback(budget: str, said: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "hydra_ext", "demo", "--steps", "1", "--layers", "2", "--width"]
    done = subprocess.run(
        [*command, "64", "--budget", budget], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert " demo: " in done.stderr.splitlines()[0]
    assert said in done.stderr
