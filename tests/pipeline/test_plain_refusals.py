"""What cannot be cut, or takes another way than it was cut for, ends on every rank with the reason: never with a wrong
loss, and never hanging."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from support.plain.plain_refusals import (
    REFUSED,
    WAYS,
    Change,
    Ended,
    plain_losses,
    refuse_changes,
    refuse_models,
)
from support.ranks import run_ranks

_REASONS = {
    "list": "a list given to the block",
    "reentrant": "use checkpoint(..., use_reentrant=False)",
    "backward": "a backward of its own",
    "chances": "took another path through the model than rank 0",
}


def test_models_that_cannot_be_cut_are_refused_with_the_reason_on_every_rank(tmp_path: Path) -> None:
    names = list(REFUSED)
    ranks = run_ranks(refuse_models, names, folder=tmp_path, size=3)
    for number, name in enumerate(names):
        for ended in (Ended(**results[number]) for results in ranks):
            assert (ended.kind, ended.losses) == ("SplitError", []), f"{name}: {ended}"
            assert _REASONS[name] in ended.text, f"{name}: {ended}"


def run_changes(changes: Sequence[Change], folder: Path, size: int) -> list[list[Ended]]:
    """By change and rank."""
    ranks = run_ranks(refuse_changes, changes, folder=folder, size=size)
    return [[Ended(**results[number]) for results in ranks] for number in range(len(changes))]


def check(change: Change, ranks: Sequence[Ended]) -> bool:
    """All ranks end at the first step that is concerned, with a cause that all name; or nothing is wrong.

    Returns:
        Whether it was an error.
    """
    expected = plain_losses(change)
    for ended in ranks:
        for step, losses in enumerate(ended.losses):
            assert torch.equal(losses, expected[step]), f"{change}: losses of step {step}"
    kinds = [ended.kind for ended in ranks]
    if set(kinds) == {""}:
        assert all(len(ended.losses) == len(expected) for ended in ranks), change
        return False
    assert set(kinds) <= {"SplitError", "RankFailed"}, f"{change}: {kinds}"
    assert "SplitError" in kinds, f"{change}: {kinds}"
    for ended in ranks:
        assert ended.kind == "SplitError" or "SplitError" in ended.text, f"{change}: {ended}"
        assert len(ended.losses) == max(change.step, 0), f"{change}: {ended}"
    return True


def test_a_rank_that_goes_another_way_from_the_start_is_told_of(tmp_path: Path) -> None:
    changes = [Change(way, step=-1, rank=number % 3) for number, way in enumerate(WAYS)]
    for change, ranks in zip(changes, run_changes(changes, tmp_path, 3), strict=True):
        assert check(change, ranks), change


@pytest.mark.full
@pytest.mark.parametrize("step", [0, 1])
def test_another_way_on_all_ranks_is_an_error_on_the_first_batch_or_gives_the_right_loss(
    step: int, tmp_path: Path
) -> None:
    changes = [Change(way, step=step) for way in WAYS]
    found = [check(change, ranks) for change, ranks in zip(changes, run_changes(changes, tmp_path, 3), strict=True)]
    # Where a stage has to itself what a batch does in another way, it may; and what the first stage sees is rehearsed.
    assert sum(found) >= len(WAYS) - 1


@pytest.mark.full
@pytest.mark.parametrize("step", [0, 1])
def test_another_way_on_one_rank_is_an_error_on_the_first_batch_or_beyond_its_stage(step: int, tmp_path: Path) -> None:
    changes = [Change(way, step=step, rank=rank) for way in WAYS for rank in range(2)]
    found = [check(change, ranks) for change, ranks in zip(changes, run_changes(changes, tmp_path, 2), strict=True)]
    assert sum(found) >= len(WAYS)


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_value_that_was_forgotten_is_an_error_on_the_first_batch(stages: int, tmp_path: Path) -> None:
    changes = [Change("drop 0", rank=rank) for rank in (None, 0, stages - 1)]
    found = [
        check(change, ranks) for change, ranks in zip(changes, run_changes(changes, tmp_path, stages), strict=True)
    ]
    # A stage that does not know the way by which a value comes rehearses it, and then knows all that crosses.
    assert found[:2] == [True, True]
