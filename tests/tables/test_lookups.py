"""Lookups whose bits, or writes, depend on more than the rows that they name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ext
from support.tables import ROWS, WIDTH, bits

BUDGET = ROWS * WIDTH * 4 // 4


def made(kind: type[nn.Module], dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(ROWS, WIDTH, **options).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "mode", "weighted"),
    [(torch.float32, "sum", True), (torch.bfloat16, "sum", False), (torch.bfloat16, "mean", False)],
)
@pytest.mark.parametrize("max_norm", [None, 1.5])
def test_a_padding_index_that_no_bag_has_counts(
    dtype: torch.dtype, mode: str, weighted: bool, max_norm: float | None
) -> None:
    """torch sums bags with a padding index in another kernel, whose sums differ."""
    plain, ours = (made(nn.EmbeddingBag, dtype, mode=mode, padding_idx=3, max_norm=max_norm) for _ in range(2))
    at = torch.randint(4, 40, (20, 10))
    weights = torch.randn(20, 10, dtype=dtype) if weighted else None
    expected = plain(at, per_sample_weights=weights)
    expected.float().square().sum().backward()
    with hydra_ext.offload(ours, budget=BUDGET // 2, device="simulated") as run:
        found = ours(at, per_sample_weights=weights)
        found.float().square().sum().backward()
        assert run.report().tables is not None
        assert bits(found.detach()).equal(bits(expected.detach()))
    assert bits(ours.weight.grad).equal(bits(plain.weight.grad))
    assert bits(ours.weight.detach()).equal(bits(plain.weight.detach()))


def test_weights_with_gaps_move_whole() -> None:
    """torch sums rows of such weights in another kernel than those that were copied."""
    bag = made(nn.EmbeddingBag, mode="sum", sparse=True)
    bag.weight = nn.Parameter(torch.randn(WIDTH, ROWS).t())
    at, weights = torch.randint(0, 40, (20, 10)), torch.randn(20, 10)
    expected = bag(at, per_sample_weights=weights).detach()
    with hydra_ext.offload(bag, budget=20 * BUDGET, device="simulated") as run:
        assert run.report().tables is None
        assert bits(bag(at, per_sample_weights=weights).detach()).equal(bits(expected))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_call_without_indices_writes_nothing(kind: type[nn.Module]) -> None:
    table = made(kind, max_norm=0.5)
    before = table.weight.detach().clone()
    empty = torch.empty(0, dtype=torch.int64)
    with hydra_ext.offload(table, budget=BUDGET, device="simulated") as run:
        table(*([empty] if kind is nn.Embedding else [empty, torch.zeros(3, dtype=torch.int64)]))
        assert run.report().tables.rows_written_back_bytes == 0  # type: ignore[union-attr]
    assert table.weight.equal(before)


def test_rows_that_are_no_numbers_count_as_written_only_if_they_were() -> None:
    plain, ours = made(nn.Embedding, max_norm=0.5), made(nn.Embedding, max_norm=0.5)
    for table in (plain, ours):
        with torch.no_grad():
            table.weight[3] = torch.nan
            table.weight[4, 0] = torch.inf
    plain(torch.tensor([3, 4]))
    with hydra_ext.offload(ours, budget=BUDGET, device="simulated") as run:
        for at, rows in ((3, 0), (4, 1)):
            ours(torch.tensor([at]))
            assert run.report().tables.rows_written_back_bytes == rows * WIDTH * 4  # type: ignore[union-attr]
    assert bits(ours.weight.detach()).equal(bits(plain.weight.detach()))


WRONG: dict[str, tuple[type[nn.Module], Callable[[], Any]]] = {
    "None": (nn.Embedding, lambda: None),
    "list": (nn.Embedding, lambda: [1, 2]),
    "floats": (nn.Embedding, lambda: torch.ones(2)),
    "bags of a list": (nn.EmbeddingBag, lambda: [1, 2]),
    "bags of floats": (nn.EmbeddingBag, lambda: torch.ones(2, 2)),
    "row": (nn.Embedding, lambda: torch.tensor([ROWS])),
    "row of a bag": (nn.EmbeddingBag, lambda: torch.tensor([[ROWS]])),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_are_no_indices_raises_as_in_torch(name: str) -> None:
    kind, wrong = WRONG[name]
    table = made(kind)
    with pytest.raises(Exception) as expected:  # noqa: PT011 - whatever torch raises
        table(wrong())
    with hydra_ext.offload(table, budget=BUDGET, device="simulated"), pytest.raises(expected.type):
        table(wrong())
