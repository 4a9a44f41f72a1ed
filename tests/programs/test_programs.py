"""Random trainings over the whole life of a run are those of plain PyTorch, bit for bit, after each operation.

Each is drawn from a number, so that the same one can be run again, or with a defect put back; what fails is printed as
a script as short as it gets. ``python -m support.lives --seeds 0:1000`` counts operations, models and refusals.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from support.lives.drawing import program_of, stateful_program_of
from support.lives.program import Program
from support.lives.reporting import Tally
from support.lives.running import run
from support.lives.shortening import shortened

PER_TEST = 60
IN_CI = range(0, 240, PER_TEST)
ALL = range(240, 20_000, PER_TEST)
MOST_REFUSED = 5  # of them: a typed error, or want of memory; on the whole at most 3 %


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
    assert tally.refused <= MOST_REFUSED, tally.text()


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.full) for first in range(60, 1200, 60))])
def test_random_programs_of_models_with_state_are_those_of_plain_pytorch(first: int) -> None:
    tally = Tally()
    for seed in range(first, first + PER_TEST):
        check(stateful_program_of(seed), seed, tally)
    assert tally.refused == 0, tally.text()


# Hypothesis draws other ones than numbers do. It would look for a shorter one for minutes: leaving operations out does
# better.
@settings(
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(st.randoms(use_true_random=False).map(program_of))
def test_programs_that_hypothesis_draws(program: Program) -> None:
    check(program, 0, Tally())
