"""Tables of ten times the budget train on several ranks, and only rows travel between these.

The bits are those of ``DistributedDataParallel``. Its own mean of dense gradients over three ranks is another one: it
divides first. There a sum in the order of the ranks is the oracle.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydra_ext.blocks import Table
from hydra_ext.tables import means
from hydra_ext.tables.lookup import TableRows
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

SPARSE = {
    "each backward is averaged": TableJob(options={"twice": True}),
    "once a step, of different numbers of rows": TableJob(optimizer="sgd", way="no_sync", m=(1, 3, 2)),
    "run.step": TableJob(way="step", m=(3, 2, 2), options={"twice": True}, step={"recompute": True}),
    "a rank without any row": TableJob(empty=1),
    "max norm": TableJob(optimizer="sgd", way="step", options={"max_norm": 2.0, "twice": True}),
    "frozen": TableJob(optimizer="sgd", frozen=True),
    "tables alone": TableJob(optimizer="sparse adam", only=True, way="step", empty=0),
}
DENSE = {
    "each backward is averaged": TableJob(sparse=False, optimizer="ours", max_norm=0.05),
    "once a step": TableJob(sparse=False, optimizer="our sgd", way="no_sync", m=(1, 3, 2), options={"twice": True}),
    "run.step": TableJob(sparse=False, optimizer="ours", way="step", m=(3, 2, 2), max_norm=0.05),
    "a rank leaves a table out": TableJob(sparse=False, optimizer="our sgd", without=(1,)),
    "all leave it out": TableJob(sparse=False, optimizer="ours", without=(0, 1)),
    "by torch": TableJob(sparse=False, optimizer="adam", without=(1,)),
    "on the disk": TableJob(sparse=False, optimizer="ours", way="step", m=(2, 1, 2), spills=True),
    "by torch in run.step": TableJob(sparse=False, optimizer="adam", way="step"),
}
FAILING = [
    TableJob(way="step", step={"round_size": 1}),
    TableJob(sparse=False, optimizer="ours", way="step", max_norm=0.05, step={"round_size": 1}),
    TableJob(optimizer="sparse adam", only=True, way="step"),
]


def expect_bits(ours: Any, plain: Any, what: object = "") -> None:
    assert len(ours) == len(plain)
    for place, (one, other) in enumerate(zip(ours, plain, strict=True)):
        assert (one is None) == (other is None), (what, place)
        assert one is None or bits(one).equal(bits(other)), (what, place)


def expect_bits_and_bytes(jobs: dict[str, TableJob], folder: Path, ranks: int = 2) -> None:
    for rank, found in enumerate(run_ranks(train_beside, [*jobs.values()], folder=folder, size=ranks)):
        for (name, job), (ours, plain, report) in zip(jobs.items(), found, strict=True):
            expect_bits(ours, plain, name)
            tables = 1 if job.only else 2
            assert report["nbytes"] == tables * ROWS * WIDTH * 4 >= 10 * tables * BUDGET
            assert report["rows_moved_bytes"] > 0
            assert report["peak"] <= BUDGET
            assert report["gradients_averaged_bytes"] == sent_rows(job, rank, ranks) * ROW_BYTES, name
            assert (report["disk"]["nbytes"] > 0) == job.spills
            assert len(report["stepped_by_rows"]) == (tables if "our" in job.optimizer else 0)


@pytest.mark.parametrize("jobs", [SPARSE, DENSE], ids=["sparse", "dense"])
def test_two_ranks_have_the_bits_of_distributed_data_parallel_and_send_rows(
    jobs: dict[str, TableJob], tmp_path: Path
) -> None:
    expect_bits_and_bytes(jobs, tmp_path)


@pytest.mark.full
def test_three_ranks_have_its_bits_of_sparse_tables(tmp_path: Path) -> None:
    jobs = {
        optimizer: TableJob(optimizer=optimizer, only=True, way=way, empty=1)
        for optimizer, way in (("sparse adam", "loop"), ("sgd", "step"), ("adagrad", "no_sync"))
    }
    expect_bits_and_bytes(jobs, tmp_path, ranks=3)


@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_an_error_on_one_rank_is_an_error_on_all_and_leaves_no_trace(fault: str, tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(disturbed, FAILING, fault, False, folder=tmp_path)):
        for plain, ours, error, _ in found:
            expected = f"Broken: in the {fault}" if rank == 1 else "RankFailed: rank 1 has failed in this step"
            assert error.startswith(expected)
            expect_bits(ours, plain)


def test_a_rank_that_runs_out_of_memory_makes_all_make_the_step_again(tmp_path: Path) -> None:
    # What an earlier backward has brought is averaged in a step whose own microbatches do not look rows up.
    early = TableJob(sparse=False, optimizer="ours", way="step", without=(0, 1), early=True)
    jobs = [replace(job, budget=10 * BUDGET, step={}) for job in (*FAILING, early)]
    for found in run_ranks(disturbed, jobs, "backward", True, folder=tmp_path):
        for plain, ours, error, retries in found:
            assert (error, retries) == ("", 2)
            expect_bits(ours, plain)


def test_what_ranks_cannot_average_is_refused_on_all(tmp_path: Path) -> None:
    for mixed, written, frozen, kinds in run_ranks(errors_of, folder=tmp_path):
        assert mixed.startswith("StateError: the gradient of 'one.weight' is sparse, or has a graph")
        assert written.startswith("StateError: something wrote to 'bags.weight' during the backward")
        assert frozen.startswith("ReplicasDiffer: the ranks have gone different ways: the ranks train different")
        assert "a table with dense gradients, of which rows move where rank 0 has" in kinds


def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    for found in run_ranks(resume, FAILING[:2], str(tmp_path), folder=tmp_path):
        for ours, plain in found:
            expect_bits(ours, plain)


def test_tables_without_memory_get_the_numbers_of_rank_0(tmp_path: Path) -> None:
    for ours, plain in run_ranks(materialized, folder=tmp_path):
        expect_bits(ours, plain)


# ---- one process -----------------------------------------------------------------------------------------------------


def table_of(gradient: Tensor | None, shape: tuple[int, int] = (9, 3)) -> TableRows:
    weight = nn.Parameter(torch.zeros(shape, dtype=torch.float32 if gradient is None else gradient.dtype))
    weight.grad = gradient
    return TableRows(Table("table", weight, (), sparse=False), torch.device("cpu"))


def random_gradient(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros of both signs, and numbers of so many sizes that the order of their sums shows."""
    made = torch.Generator().manual_seed(seed)
    dense = torch.zeros(9, 3)
    rows = torch.randperm(9, generator=made)[:5]
    dense[rows] = torch.randn(5, 3, generator=made) * 10.0 ** torch.randint(-4, 4, (5, 3), generator=made)
    dense[rows[0]] = torch.tensor([-0.0, 0.0, -0.0])
    dense[rows[1], 1] = -0.0
    return dense.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_dense_means_are_sums_in_the_order_of_the_ranks(ranks: int, dtype: torch.dtype) -> None:
    for seed in range(0, 5 * ranks, ranks):
        gradients = [random_gradient(seed + rank, dtype) for rank in range(ranks)]
        expected = gradients[0]
        for gradient in gradients[1:]:
            expected = expected + gradient
        expected = expected / ranks
        tables = [table_of(gradient.clone()) for gradient in gradients]
        shares = [means.share_of(table, ranks) for table in tables]
        assert all(len(share.rows) <= 5 for share in shares)
        lacking = table_of(None)
        lacking.host.data = lacking.host.data.to(dtype)
        for table in (*tables, lacking):
            means.put_mean(table, shares)
            assert table.host.grad is not None
            assert bits(table.host.grad).equal(bits(expected))


def test_a_row_of_no_number_travels() -> None:
    gradient = torch.zeros(9, 3)
    gradient[[2, 5, 7], 1] = torch.tensor([torch.nan, -0.0, torch.inf])
    assert means.share_of(table_of(gradient), 2).rows.tolist() == [2, 5, 7]


def test_shares_of_several_types_are_packed_without_gaps() -> None:
    tables = [table_of(random_gradient(0, torch.bfloat16)), table_of(None), table_of(random_gradient(1, torch.float64))]
    shares = [means.share_of(table, 2) for table in tables]
    data = means.packed(shares)
    assert len(data) == sum(
        len(share.rows) * means.row_bytes(table) for share, table in zip(shares, tables, strict=True)
    )
    found = means.unpacked(data, tables, [(share.kind, len(share.rows)) for share in shares])
    for one, other in zip(found, shares, strict=True):
        assert one.kind == other.kind
        assert one.rows.equal(other.rows)
        assert one.values.equal(other.values)
        assert one.values.dtype == other.values.dtype
