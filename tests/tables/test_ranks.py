"""Tables of ten times the budget train on several ranks with the bits of DistributedDataParallel, row by row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.ranks import run_ranks
from support.replicas.replicated_tables import (
    TableJob,
    disturbed,
    errors_of,
    materialized,
    resume,
    sent_rows,
    train_beside,
)
from support.tables import BUDGET, ROWS, WIDTH, bits

# torch's Adagrad makes sparse tensors without saying whether to check them.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

ROW_BYTES = 8 + WIDTH * 4  # of a row that travels, with its number


def expect_bits(ours: Any, plain: Any) -> None:
    assert len(ours) == len(plain)
    for place, (one, other) in enumerate(zip(ours, plain, strict=True)):
        assert (one is None) == (other is None), place
        assert one is None or bits(one).equal(bits(other)), place


def check(jobs: list[TableJob], folder: Path, ranks: int = 2) -> None:
    every = run_ranks(train_beside, jobs, folder=folder, size=ranks)
    for rank, of_rank in enumerate(every):
        for number, (job, (ours, plain, tables)) in enumerate(zip(jobs, of_rank, strict=True)):
            expect_bits(ours, plain)
            tables_of_job = 1 if job.only else 2
            assert tables["nbytes"] == tables_of_job * ROWS * WIDTH * 4
            assert tables["rows_moved_bytes"] > 0
            assert tables["peak"] <= BUDGET
            assert len(tables["stepped_by_rows"]) == (tables_of_job if "our" in job.optimizer else 0)
            assert tables["gradients_averaged_bytes"] == sent_rows(job, rank, ranks) * ROW_BYTES, (number, rank)


SPARSE = {
    "loop": TableJob(),
    "sgd, no_sync": TableJob(optimizer="sgd", way="no_sync", m=(1, 3), options={"twice": True}),
    "step": TableJob(way="step", m=(3, 2), options={"twice": True}, step={"recompute": True}),
    "a rank without any row": TableJob(way="loop", empty=1),
    "frozen": TableJob(optimizer="sgd", frozen=True),
    "tables alone": TableJob(optimizer="sparse adam", only=True),
    "tables alone, step": TableJob(optimizer="sparse adam", only=True, way="step", empty=0),
}
DENSE = {
    "loop": TableJob(sparse=False, optimizer="ours", max_norm=0.05),
    "no_sync": TableJob(sparse=False, optimizer="our sgd", way="no_sync", m=(1, 3), options={"twice": True}),
    "step": TableJob(sparse=False, optimizer="ours", way="step", m=(3, 2), max_norm=0.05),
    "without": TableJob(sparse=False, optimizer="our sgd", without=(1,)),
    "without, by torch": TableJob(sparse=False, optimizer="adam", without=(1,)),
    "without on all ranks": TableJob(sparse=False, optimizer="ours", without=(0, 1)),
    "by torch, step": TableJob(sparse=False, optimizer="adam", way="step"),
}


@pytest.mark.parametrize("jobs", [SPARSE, DENSE], ids=["sparse", "dense"])
def test_a(jobs, tmp_path: Path) -> None:
    check(list(jobs.values()), tmp_path)


FAILING = [
    TableJob(way="step", step={"round_size": 1}),
    TableJob(sparse=False, optimizer="ours", way="step", max_norm=0.05, step={"round_size": 1}),
    TableJob(optimizer="sparse adam", only=True, way="step"),
]


@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_an_error_on_one_rank_is_an_error_on_all(fault: str, tmp_path: Path) -> None:
    for rank, of_rank in enumerate(run_ranks(disturbed, FAILING, fault, False, folder=tmp_path)):
        for plain, ours, error, _ in of_rank:
            expected = f"Broken: in the {fault}" if rank == 1 else "RankFailed: rank 1 has failed in this step"
            assert error.startswith(expected)
            expect_bits(ours, plain)


def test_ranks_make_a_step_again_together(tmp_path: Path) -> None:
    jobs = [replace(job, budget=10 * BUDGET, step={}) for job in FAILING[:2]]
    for rank, of_rank in enumerate(run_ranks(disturbed, jobs, "backward", True, folder=tmp_path)):
        for plain, ours, error, retries in of_rank:
            print(rank, error, retries)
            assert error == ""
            assert retries >= 1
            expect_bits(ours, plain)


def test_what_ranks_cannot_average_is_refused_on_all(tmp_path: Path) -> None:
    for mixed, written, frozen, kinds in run_ranks(errors_of, folder=tmp_path):
        assert mixed.startswith("StateError: the gradient of 'one.weight' is sparse, or has a graph")
        assert written.startswith("StateError: something wrote to 'bags.weight' during the backward")
        assert frozen.startswith("ReplicasDiffer: the ranks have gone different ways: the ranks train different")
        assert "a table of dense gradients of which rows move where rank 0 has" in kinds


def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    for of_rank in run_ranks(resume, FAILING[:2], str(tmp_path), folder=tmp_path):
        for ours, plain in of_rank:
            expect_bits(ours, plain)


def test_tables_without_memory_get_the_numbers_of_rank_0(tmp_path: Path) -> None:
    for ours, plain in run_ranks(materialized, folder=tmp_path):
        expect_bits(ours, plain)
