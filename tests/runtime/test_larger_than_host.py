"""A model of ten times the host's budget trains from the disk: the same bits, within the budgets, by counted bytes."""

from __future__ import annotations

import pytest

from support.runtime import larger_than_host
from support.runtime.larger_than_host import (
    CONSTANT,
    DEPTH,
    DEVICE_BUDGET,
    HOST_BUDGET,
    STEPS,
    WEIGHT,
    WEIGHTS_ON_DISK,
    WHOLE,
    Outcome,
)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("spill")
    found = larger_than_host.observe(folder)  # where more address space than the budgets is an error
    assert not list(folder.iterdir())
    return found


def test_its_losses_weights_and_moments_are_those_of_a_plain_loop(seen: Outcome) -> None:
    plain = larger_than_host.observe(None)
    assert len(set(plain.losses)) == STEPS
    assert len(set(plain.sums)) == len(plain.sums) == DEPTH * 2 * 3
    assert seen.losses == plain.losses
    assert seen.sums == plain.sums


def test_the_process_holds_what_the_budgets_say(seen: Outcome) -> None:
    assert WHOLE >= 10 * HOST_BUDGET
    assert seen.on_disk == DEPTH * (WEIGHTS_ON_DISK + 2 * WEIGHT), "of the gradients nothing is left"
    assert HOST_BUDGET < seen.peak <= HOST_BUDGET + DEVICE_BUDGET + CONSTANT


def test_the_disk_moves_what_the_formula_says(seen: Outcome) -> None:
    update = WEIGHTS_ON_DISK + 2 * WEIGHT
    assert seen.weights == DEPTH * WEIGHTS_ON_DISK
    assert seen.loads >= (2 * STEPS - 1) * DEPTH - STEPS * (DEVICE_BUDGET // WEIGHT)  # nearly each in each pass
    assert seen.written == DEPTH * (WEIGHTS_ON_DISK + STEPS * (WEIGHT + update))  # when entering, and in each step
    there_is_no_state_before_the_first_step = DEPTH * 2 * WEIGHT
    step = WEIGHT + WEIGHT + update  # gradients for their norm, and with the rest
    assert 0 < seen.spared <= (STEPS - 1) * DEPTH * WEIGHTS_ON_DISK, "fills that an update had the weights for"
    loads = seen.loads * WEIGHTS_ON_DISK - seen.spared
    assert seen.read == loads + STEPS * DEPTH * step - there_is_no_state_before_the_first_step
