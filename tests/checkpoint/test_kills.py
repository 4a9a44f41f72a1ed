"""SIGKILL at any moment of steps and saves: what was saved last is whole, and the run that goes on ends as it would.

Whatever tier weights, gradients and the optimizer's state were in, and in whatever tier it goes on.
"""

from __future__ import annotations

import functools
import random
import signal
import tempfile
from pathlib import Path

import pytest

from hydra_ext.checkpoint.verifying import verify
from support.checkpoint import killed
from support.checkpoint.killed import TIERS

SEEDS = 40


@functools.cache
def uninterrupted() -> str:
    return killed.plain()


@functools.cache
def moments(tier: str) -> int:
    """That a whole run has."""
    with tempfile.TemporaryDirectory() as folder:
        found, count, tiers = killed.train(Path(folder) / "ckpt", tier, None)
    assert found == uninterrupted()
    assert tier in tiers <= {tier, "host"}  # the device becomes a home after some steps, and until a save
    return count


# By default every tier once; half of the runs go on in the same one.
RUNS = [
    pytest.param(seed, tier, marks=[] if seed == number % 2 else pytest.mark.full)
    for seed in range(SEEDS)
    for number, tier in enumerate(TIERS)
]


@pytest.mark.parametrize(("seed", "tier"), RUNS)
def test_a_killed_run_goes_on_as_if_it_had_not_been(seed: int, tier: str, tmp_path: Path) -> None:
    draw = random.Random(seed)
    folder = tmp_path / "ckpt"
    others = [each for each in TIERS if each != tier]
    going_on = tier if seed % 2 else others[seed // 2 % len(others)]
    whole = moments(tier)
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
