"""SIGKILL at any moment of steps and saves: what was saved last is whole, and the run that goes on ends as it would."""

from __future__ import annotations

import functools
import random
import signal
from pathlib import Path

import pytest

from hydra_ext.checkpoint.verifying import verify
from support import killed

FEW, ALL = 4, 40


@functools.cache
def uninterrupted() -> str:
    return killed.plain()


@functools.cache
def moments(folder: Path) -> int:
    """That a whole run has."""
    found, count = killed.train(folder, None)
    assert found == uninterrupted()
    return count


@pytest.fixture(scope="session")
def counted(tmp_path_factory: pytest.TempPathFactory) -> int:
    return moments(tmp_path_factory.mktemp("counted") / "ckpt")


@pytest.mark.parametrize("seed", [*range(FEW), *(pytest.param(s, marks=pytest.mark.full) for s in range(FEW, ALL))])
def test_a_killed_run_goes_on_as_if_it_had_not_been(seed: int, counted: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    folder = tmp_path / "ckpt"
    for last in (draw.randrange(1, counted), draw.randrange(1, counted // 2), None):
        code, found = killed.in_a_process(folder, last)
        states = [verdict.state for verdict in verify(folder)] if folder.exists() else []
        if last is None:
            assert (code, found) == (0, uninterrupted())
            assert states == ["whole"] * 2
            assert len(list(folder.iterdir())) == 2
        else:
            assert (code, found) in ((-signal.SIGKILL, ""), (0, uninterrupted()))
            assert states.count("damaged") == 0
            assert len(states) - states.count("whole") <= 2  # what was being written, and being removed
