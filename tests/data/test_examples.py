"""The examples of the feed run, and what they train gets better."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(folder: Path, name: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def figures(output: str, pattern: str) -> list[float]:
    return [float(each) for each in re.findall(pattern, output)]


@pytest.mark.full
def test_the_recommender_reads_parquet_and_moves_rows(tmp_path: Path) -> None:
    output = printed(tmp_path, "recommender.py", "--steps", "40", "--files", "2", "--folder", "files")
    first, last = figures(output, r"loss (\S+)")
    assert last < first < 0.8
    assert "tables 46.4 MiB, budget 9.3 MiB" in output
    assert "tables   26, 46.4 MiB on the host" in output
    assert len(list((tmp_path / "files").iterdir())) == 2


@pytest.mark.full
def test_photographs_are_told_apart(tmp_path: Path) -> None:
    shares = figures(printed(tmp_path, "feed_photographs.py"), r"(\d+)% of the crops")
    assert len(shares) == 4
    assert shares[-1] > 80


@pytest.mark.full
def test_texts_are_learned(tmp_path: Path) -> None:
    losses = figures(printed(tmp_path, "feed_texts.py"), r"loss (\S+)")
    assert len(losses) == 4
    assert losses[-1] < 7.0  # the logarithm of the number of words is 7.6
