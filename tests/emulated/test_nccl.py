"""The emulated NCCL keeps NCCL's rules: what would hang there is an error here, or hangs too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support import collectives
from support.ranks import BOTH, NCCL, run_ranks

pytestmark = pytest.mark.emulated


def numbers(rank: int, count: int = 6) -> torch.Tensor:
    return collectives.numbers(rank, count).cpu()


def in_order(size: int, count: int = 6) -> torch.Tensor:
    total = numbers(0, count)
    for rank in range(1, size):
        total = total + numbers(rank, count)
    return total


@pytest.mark.parametrize(("size", "backend"), [(2, NCCL), (3, NCCL), (4, BOTH)])
def test_operations_give_what_torch_documents_and_add_in_the_order_of_ranks(
    size: int, backend: str, tmp_path: Path
) -> None:
    found = run_ranks(collectives.results, folder=tmp_path, size=size, backend=backend)
    if size > 2:  # the order is visible
        assert not torch.equal(in_order(size), sum(numbers(rank) for rank in (0, 2, *range(1, size, 2))))
    for rank, seen in enumerate(found):
        assert torch.equal(seen["sum"], in_order(size))
        assert torch.equal(seen["avg"], in_order(size) / size)
        assert torch.equal(seen["max"], torch.stack([numbers(each) for each in range(size)]).amax(0))
        assert torch.equal(seen["bf16"], found[0]["bf16"])
        assert seen["bool"].tolist() == [True, False]
        assert torch.equal(seen["broadcast"], numbers(1))
        assert torch.equal(seen["reduce"], in_order(size) if rank == 1 else numbers(rank))
        everything = [numbers(each) for each in range(size)]
        assert all(torch.equal(a, b) for a, b in zip(seen["all_gather"], everything, strict=True))
        assert torch.equal(seen["gathered"], torch.cat(everything))
        own = slice(6 * rank, 6 * rank + 6)
        assert torch.equal(seen["reduce_scatter"], in_order(size, 6 * size)[own])
        assert torch.equal(seen["all_to_all"], torch.cat([numbers(each, 6 * size)[own] for each in range(size)]))
        assert torch.equal(seen["sent"], numbers(0 if rank == 1 else rank))
        assert torch.equal(seen["ring"], numbers((rank - 1) % size))


def test_what_nccl_cannot_do_is_refused(tmp_path: Path) -> None:
    for host, gaps, integers, reduction in run_ranks(collectives.refusals, folder=tmp_path, backend=NCCL):
        assert "No backend type associated with device type cpu" in host
        assert "contiguous" in gaps
        assert "Unconvertible NCCL type Short" in integers
        assert "ReduceOp" in reduction


def test_an_operation_follows_the_current_stream_and_the_host_does_not_wait(tmp_path: Path) -> None:
    first, second = run_ranks(collectives.behind, folder=tmp_path, backend=NCCL)
    assert first["before"].tolist() == [10.0] * 4  # a read without a wait sees the numbers before
    assert not first["completed"]
    assert first["completed at last"]
    assert first["after"].tolist() == second["after"].tolist() == [12.0] * 4


def test_the_first_operation_waits_for_the_other_ranks_and_an_eager_group_needs_none(tmp_path: Path) -> None:
    first, second = run_ranks(collectives.first_use, folder=tmp_path, backend=NCCL)
    assert first["waits"]
    for seen in (first, second):
        assert (seen["lazy"], seen["made"], seen["eager"]) == (0, 1, 1)


@pytest.mark.parametrize("name", list(collectives.MISMATCHES))
def test_operations_that_do_not_fit_are_an_error_of_both_ranks(name: str, tmp_path: Path) -> None:
    for text in run_ranks(collectives.mismatch, name, folder=tmp_path, backend=NCCL):
        for each in collectives.MISMATCHES[name][2]:
            assert each in text
        assert "rank 0" in text
        assert "rank 1" in text


def test_a_wait_with_a_timeout_blocks_the_host_and_ends(tmp_path: Path) -> None:
    error, _ = run_ranks(collectives.late, folder=tmp_path, backend=NCCL)
    assert "timed out" in error


@pytest.mark.parametrize("call", list(collectives.WAITS))
def test_a_kernel_of_a_dead_peer_holds_the_device_until_it_is_aborted(call: str, tmp_path: Path) -> None:
    (seen,) = run_ranks(collectives.dead_peer, call, folder=tmp_path, backend=NCCL, survivors=[0])
    assert seen["waits"]
    assert not seen["completed"]
    assert not seen["waits after abort"]
    assert "aborted" in seen["error"]
    assert seen["streams work"] == 2.0
    assert "aborted" in seen["later"]
