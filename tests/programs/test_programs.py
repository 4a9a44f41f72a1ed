"""Random trainings over the whole life of a run are those of plain PyTorch, bit for bit, after each operation.

Each is drawn from a number, so that the same one can be run again, or with a defect put back; what fails is printed as
a script as short as it gets. ``python -m support.lives --seeds 0:1000`` counts operations, models and refusals.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.lives.drawing import program_of
from support.lives.program import Program
from support.lives.reporting import Tally
from support.lives.running import run
from support.lives.shortening import shortened

PER_TEST = 60
IN_CI = range(0, 240, PER_TEST)
ALL = range(240, 20_000, PER_TEST)
REFUSED = 0.03  # of the programs may end an operation in a typed error or for want of memory


def check(program: Program, seed: int, tally: Tally) -> None:
    outcome = run(program)
    tally.count(seed, program, outcome)
    if outcome.wrong:
        pytest.fail(f"program {seed}: {outcome.wrong[0]}\n\n{shortened(program).script()}")


@pytest.mark.parametrize("first", [*IN_CI, *(pytest.param(first, marks=pytest.mark.full) for first in ALL)])
def test_random_programs_are_those_of_plain_pytorch(first: int) -> None:
    tally = Tally()
    for seed in range(first, first + PER_TEST):
        check(program_of(seed), seed, tally)
    assert tally.refused <= max(REFUSED * tally.programs, 4), tally.text()


@settings(max_examples=60, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False).map(program_of))
def test_programs_that_are_made_simpler_by_hypothesis(program: Program) -> None:
    outcome = run(program)
    assert outcome.wrong == [], program.script()
