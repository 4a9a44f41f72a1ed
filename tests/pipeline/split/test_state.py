"""What a forward keeps beside its result is right in every stage that reads it, or the cut is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from support.split_models_own import text, text_loss
from support.split_models_state import (
    AssignsAtTheEnd,
    AssignsOnly,
    AveragesWeight,
    CountsSteps,
    Momentum,
    OwnLoads,
    ReadsLoads,
)
from support.split_stages import Fn, assert_same, rehearsed, run, run_plainly, shared

BATCHES = [text(torch.Generator().manual_seed(seed)) for seed in (1, 2, 3)]


def possible_cuts(model: nn.Module, fn: Fn = text_loss, batches: list[Any] = BATCHES) -> list[int]:
    """Each gives what the whole model gives in several microbatches."""
    expected = run_plainly(model, fn, batches)
    rehearsal = rehearsed(model, fn, batches[0])
    for boundary in rehearsal.possible_cuts:
        found = run(model, fn, batches, [boundary], rehearsal)
        assert_same(found, expected, shared(model, rehearsal, [boundary]))
    return rehearsal.possible_cuts


def why(model: nn.Module, boundary: int, fn: Fn = text_loss) -> str:
    """A cut there is refused."""
    return "; ".join(rehearsed(model, fn, BATCHES[0]).boundaries[boundary].reasons)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# ---- buffers that are replaced, not written to -----------------------------------------------------------------------
def test_a_buffer_that_the_glue_replaces_is_written() -> None:
    assert possible_cuts(AssignsAtTheEnd()) == [5]  # the glue after the last layer is no longer before the cut
    assert "mean is used on both sides, and written" in why(AssignsAtTheEnd(), 3)


def test_the_stage_that_replaces_a_buffer_has_the_right_one() -> None:
    assert possible_cuts(AssignsOnly()) == [1, 2, 3, 4, 5]


def test_a_buffer_that_only_its_block_replaces_stays_in_its_stage() -> None:
    assert possible_cuts(OwnLoads()) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("at_the_end", "cuts"), [(False, [5]), (True, [1, 5])])
def test_a_buffer_that_a_block_replaces_is_read_in_its_stage_only(at_the_end: bool, cuts: list[int]) -> None:
    model = ReadsLoads()
    model.at_the_end = at_the_end
    assert possible_cuts(model) == cuts
    assert "load is used on both sides, and written" in why(model, 2)


@pytest.mark.parametrize(("after", "cuts"), [(0, [1, 2, 3, 4, 5]), (2, [1, 2, 3, 4, 5]), (3, [1, 2, 4, 5])])
def test_a_buffer_that_every_stage_counts_alike_is_set_where_all_come_that_read_it(after: int, cuts: list[int]) -> None:
    assert possible_cuts(CountsSteps(after)) == cuts
    assert after != 3 or "set for the next microbatch" in why(CountsSteps(after), 3)


# ---- buffers and weights made from weights ---------------------------------------------------------------------------
def test_a_weight_that_a_buffer_is_made_from_is_there() -> None:
    assert possible_cuts(AveragesWeight()) == [1, 2, 3, 4, 5]


def test_weights_that_follow_others_have_them() -> None:
    assert possible_cuts(Momentum(at_the_end=False)) == list(range(1, 11))
    # the slow layers, the events 6 to 9, are used there and written to after the last
    assert possible_cuts(Momentum(at_the_end=True)) == [1, 2, 3, 4, 5, 6, 10]
