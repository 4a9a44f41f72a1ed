"""Random trainings whose saved tensors leave the device, and no weights, are those of plain PyTorch, bit for bit."""

from __future__ import annotations

import pytest

from support.lives.drawing import program_of
from support.lives.reporting import Tally
from support.lives.running import run
from support.lives.shortening import shortened

PER_TEST = 30
ALL = range(PER_TEST, 3000, PER_TEST)


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.full) for first in ALL)])
def test_random_programs_of_a_stash_are_those_of_plain_pytorch(first: int) -> None:
    tally = Tally()
    for seed in range(first, first + PER_TEST):
        program = program_of(seed, stash=True)
        outcome = run(program)
        tally.count(seed, program, outcome)
        if outcome.wrong:
            pytest.fail(f"program {seed}: {outcome.wrong[0]}\n\n{shortened(program).script()}")
    assert tally.refused <= 2, tally.text()
