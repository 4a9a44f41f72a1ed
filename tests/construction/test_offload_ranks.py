"""Several ranks, each with a copy of a model without memory: all get rank 0's numbers, and fail together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.construction.materialized import OPTIMIZERS, SEED, train_briefly, write_weights
from support.construction.materialized_ranks import FAMILY, enter_one_with_memory, enter_without_files, train_together
from support.ranks import run_ranks


@pytest.mark.parametrize("source", [pytest.param("numbers", marks=pytest.mark.full), "files"])
def test_the_copies_train_as_that_of_rank_0(source: str, tmp_path: Path) -> None:
    plain = FAMILY.make(SEED)  # the batches of all ranks are the same, and so the mean of their gradients
    weights = write_weights(plain, tmp_path / "weights") if source == "files" else None
    optimizer = OPTIMIZERS["native"](list(plain.parameters()))
    expected = [*train_briefly(plain, optimizer, FAMILY), *plain.parameters()]
    ranks = run_ranks(train_together, None if weights is None else str(weights), folder=tmp_path)
    for rank, (seen, calls) in enumerate(ranks):
        assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True)), rank
        assert (calls > 2) is (rank == 1 or weights is None)


def test_files_that_one_rank_has_not_are_an_error_of_all(tmp_path: Path) -> None:
    for rank in range(2):
        write_weights(FAMILY.make(SEED), tmp_path / str(rank))
    first, second = run_ranks(enter_without_files, str(tmp_path), folder=tmp_path)
    assert first[0] == "RankFailed"
    assert second[0] == "WeightsError"
    assert "cannot be read" in first[1]
    assert first[2]
    assert second[2]


def test_a_copy_with_memory_is_not_like_one_without(tmp_path: Path) -> None:
    for kind, message, _ in run_ranks(enter_one_with_memory, folder=tmp_path):
        assert kind == "ReplicasDiffer"
        assert "rank 1 has a trained parameter 'transformer.wte.weight'" in message
        assert "and no memory" in message
