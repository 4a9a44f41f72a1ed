"""What several stages hold has the same numbers in all of them, also where every rank was seeded for itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hydra_ext.split.stage_program import event_seed
from support.plain.other_seeds import COMMON, first_losses, train, train_explicit
from support.ranks import run_ranks


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("schedule", "replicas", "materialized"), [("1f1b", 1, False), ("2bw", 1, True), ("1f1b", 2, False)]
)
def test_what_several_stages_hold_begins_as_the_first_has_it(
    schedule: str, replicas: int, materialized: bool, tmp_path: Path
) -> None:
    ranks = run_ranks(train, schedule, replicas, materialized, folder=tmp_path, size=2 * replicas)
    expected = first_losses((0, replicas))  # ranks of the first line
    for rank, found in enumerate(ranks):
        assert torch.equal(found["losses"][0], expected), f"rank {rank}"
        assert torch.equal(found["losses"], ranks[0]["losses"]), f"rank {rank}"
        assert found["common"].keys() == set(COMMON)
        for name, tensor in found["common"].items():
            assert torch.equal(tensor, ranks[0]["common"][name]), f"rank {rank}: {name}"


@pytest.mark.parametrize("frozen", [False, True])
def test_what_stages_given_as_modules_have_in_common_begins_as_the_first_has_it(frozen: bool, tmp_path: Path) -> None:
    first, second = run_ranks(train_explicit, frozen, folder=tmp_path)
    assert torch.equal(first, second)


def test_every_event_has_two_seeds_of_its_own() -> None:
    """Of what its block draws, and of what is drawn after it: they are a part of what a checkpoint goes on with."""
    seeds = {event_seed(seed, event, after=after) for seed in (0, 7) for event in range(50) for after in (False, True)}
    assert len(seeds) == 200
    assert event_seed(7, 3) == event_seed(7, 3, after=False)
