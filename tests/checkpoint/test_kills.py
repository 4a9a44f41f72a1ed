"""SIGKILL at any moment of steps and saves: what was saved last is whole, and the run that goes on ends as it would.

Whatever tier weights, gradients and the optimizer's state were in, and in whatever tier it goes on.
"""

from __future__ import annotations

import functools
import random
import signal
from pathlib import Path

import pytest

from hydra_ext.checkpoint.verifying import verify
from support.checkpoint import killed
from support.checkpoint.killed import TIERS

FEW, ALL = 2, 40


@functools.cache
def uninterrupted() -> str:
    return killed.plain()


@functools.cache
def moments(folder: Path, tier: str) -> int:
    """That a whole run has."""
    found, count, tiers = killed.train(folder / "ckpt", tier, None)
    assert found == uninterrupted()
    assert tier in tiers <= {tier, "host"}  # the device becomes a home after some steps, and until a save
    return count


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    return {tier: moments(tmp_path_factory.mktemp("counted"), tier) for tier in TIERS}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("seed", [*range(FEW), *(pytest.param(s, marks=pytest.mark.full) for s in range(FEW, ALL))])
def test_a_killed_run_goes_on_as_if_it_had_not_been(
    seed: int, tier: str, counted: dict[str, int], tmp_path: Path
) -> None:
    draw = random.Random(seed)
    folder = tmp_path / "ckpt"
    others = [each for each in TIERS if each != tier]
    going_on = tier if seed % 2 else others[seed // 2 % len(others)]
    whole = counted[tier]
    for last, where in ((draw.randrange(1, whole), tier), (draw.randrange(1, whole // 2), tier), (None, going_on)):
        code, found = killed.in_a_process(folder, where, last)
        states = [verdict.state for verdict in verify(folder)] if folder.exists() else []
        spill = killed.spill_dir(folder)
        assert not spill.exists() or not list(spill.iterdir())
        if last is None:
            assert (code, found) == (0, uninterrupted())
            assert states == ["whole"] * 2
            assert len(list(folder.iterdir())) == 2
        else:
            assert (code, found) in ((-signal.SIGKILL, ""), (0, uninterrupted()))
            assert states.count("damaged") == 0
            assert len(states) - states.count("whole") <= 2  # what was being written, and being removed
