"""Random lives of a pipeline on two ranks are those of the recurrence in one process, bit for bit.

Each is drawn from a number; many of them share one pair of processes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.lives.staged import expected_of, live_all, staged_program_of, wrong
from support.ranks import run_ranks

PER_TEST = 10  # within the time that ranks have on a busy machine
IN_CI = range(0, 100, PER_TEST)
ALL = range(100, 2000, PER_TEST)


@pytest.mark.cases(1)
@pytest.mark.parametrize("first", [*IN_CI, *(pytest.param(first, marks=pytest.mark.full) for first in ALL)])
def test_random_lives_of_a_pipeline_are_the_recurrence(first: int, tmp_path: Path) -> None:
    programs = [staged_program_of(seed) for seed in range(first, first + PER_TEST)]
    ranks = run_ranks(live_all, programs, tmp_path / "saved", folder=tmp_path)
    refused = 0
    for seed, program, *seen in zip(range(first, first + PER_TEST), programs, *ranks, strict=True):
        assert wrong(program, expected_of(program), seen) == [], f"program {seed}: {program}"
        refused += any(isinstance(one, str) for one in (*seen[0], *seen[1]))
    assert refused <= 1
