"""Random trainings over the whole life of a run are those of plain PyTorch, bit for bit, after each operation.

Each is drawn from a number, so that the same one can be run again, or with a defect put back; what fails is printed as
a script as short as it gets. ``python -m support.lives --seeds 0:1000`` counts operations, models and refusals.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hydra_ext.errors import CheckpointError
from support.lives import running
from support.lives.drawing import program_of, stateful_program_of
from support.lives.program import Program, op
from support.lives.reporting import Tally
from support.lives.running import run
from support.lives.shortening import shortened

PER_TEST = 60
IN_CI = range(0, 240, PER_TEST)
ALL = range(240, 20_000, PER_TEST)
MOST_REFUSED = 0.03  # of all that run: a typed error, or want of memory


@pytest.fixture(scope="module")
def sample() -> Iterator[Tally]:
    tally = Tally()
    yield tally
    assert tally.refused <= MOST_REFUSED * tally.programs, tally.text()


def check(program: Program, seed: int, tally: Tally) -> None:
    outcome = run(program)
    tally.count(seed, program, outcome)
    if outcome.wrong:
        pytest.fail(f"program {seed}: {outcome.wrong[0]}\n\n{shortened(program).script()}")


@pytest.mark.cases(1)
@pytest.mark.parametrize("first", [*IN_CI, *(pytest.param(first, marks=pytest.mark.full) for first in ALL)])
def test_random_programs_are_those_of_plain_pytorch(first: int, sample: Tally) -> None:
    for seed in range(first, first + PER_TEST):
        check(program_of(seed), seed, sample)


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.full) for first in range(30, 1200, 30))])
def test_random_programs_of_models_with_state_are_those_of_plain_pytorch(first: int) -> None:
    tally = Tally()
    for seed in range(first, first + 30):
        check(stateful_program_of(seed), seed, tally)
    assert tally.refused == 0, tally.text()


# Hypothesis draws other ones than numbers do. It would look for a shorter one for minutes: leaving operations out does
# better.
@pytest.mark.full
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


@pytest.mark.parametrize("name", ["save", "load"])
def test_a_checkpoint_that_is_refused_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(_side: object) -> None:
        raise CheckpointError("it is damaged", file=Path("step"))

    monkeypatch.setitem(running.OPERATIONS, name, refuses)
    outcome = run(Program("layered", "AdamW", 0, (op(name),)))
    assert outcome.wrong == [f"operation 0, op('{name}'): CheckpointError: it is damaged"]
    assert not outcome.refusals
