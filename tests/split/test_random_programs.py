"""Random programs: every cut that is said to be possible gives what the program gives as a whole."""

from __future__ import annotations

import copy

import pytest
from torch import Tensor, nn

from hydra_ext.errors import SplitError
from support.split.split_programs import WRITES, Program, make_batches, make_program
from support.split.split_stages import SEED, Outcome, assert_same, cut, rehearsed, run, shared, without


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch)
    return found


def works(seed: int) -> bool:
    """Whether it calls blocks, and plain PyTorch can run its backward, as it cannot after some writes in place."""
    model = make_program(seed)
    if sum("call" in step for step in model.steps) < 2:
        return False
    try:
        loss(copy.deepcopy(model), make_batches(1)[0]).backward()
    except RuntimeError:
        return False
    return True


def assert_equal(model: Program, found: Outcome, expected: Outcome, held_twice: set[str]) -> None:
    """To the bit; where it writes in place, gradients may be added up in another order."""
    inexact = held_twice if not WRITES.intersection(model.steps) else set(expected.gradients)
    assert_same(found, expected, inexact, tolerance=2e-6)


def check(seed: int) -> int:
    """How many cuts are possible."""
    model = make_program(seed)
    (batch,) = make_batches(1)
    rehearsal = rehearsed(model, loss, batch)
    expected = run(model, loss, [batch], [], rehearsal)
    possible = rehearsal.possible_cuts
    for cuts in ([boundary] for boundary in possible):
        assert_equal(model, run(model, loss, [batch], cuts, rehearsal), expected, shared(model, rehearsal, cuts))
    cuts = possible[::2]
    stages = cut(model, loss, rehearsal, cuts)
    passes = stages.forward(batch, seed=SEED, copies=False)
    stages.backward(passes)
    assert_equal(model, stages.outcome([passes]), expected, shared(model, rehearsal, cuts))
    return len(possible)


def check_drops(seed: int) -> int:
    """How many values were found missing; one that is not was sent needlessly."""
    model = make_program(seed)
    (batch,) = make_batches(1)
    rehearsal = rehearsed(model, loss, batch)
    expected = run(model, loss, [batch], [], rehearsal)
    missed = 0
    for boundary in rehearsal.possible_cuts:
        for key in rehearsal.boundaries[boundary].values:
            try:
                found = run(model, loss, [batch], [boundary], without(rehearsal, boundary, key))
            except SplitError:
                missed += 1
            else:
                assert_equal(model, found, expected, set(expected.gradients))
    return missed


def test_values_that_random_programs_need_are_missed_where_they_do_not_cross() -> None:
    assert sum(check_drops(seed) for seed in range(8) if works(seed)) > 8


def test_random_programs_can_be_cut() -> None:
    chosen = [seed for seed in range(16) if works(seed)]
    assert len(chosen) > 4
    assert sum(check(seed) > 0 for seed in chosen) > 3


@pytest.mark.full
@pytest.mark.parametrize("block", range(10))
def test_more_random_programs_can_be_cut(block: int) -> None:
    chosen = [seed for seed in range(1000 + 200 * block, 1200 + 200 * block) if works(seed)]
    assert sum(check(seed) > 0 for seed in chosen) > 40
    assert sum(check_drops(seed) for seed in chosen[:20]) > 100
