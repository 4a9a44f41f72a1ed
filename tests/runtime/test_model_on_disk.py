"""Weights and gradients whose home is the disk: the bits of the plain loop, and counted bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext import Checks, Run, SimulatedDevice, optim
from hydra_ext._C.testing import FaultyFiles
from hydra_ext.optim.host_optimizer import HostOptimizer
from hydra_ext.runtime.spilling import BlockSizes, choose
from support.benches import assert_same
from support.native import BETWEEN, OPTIMIZERS, STEPS, WIDTH, state, train

DEVICE_BUDGET = 2**19
WEIGHTS = 4 * WIDTH * WIDTH + 512  # of one layer, with its bias, as they lie in a slot
GRADIENT = 4 * WIDTH * WIDTH  # of one layer's weight; the bias' is too small for the disk
FILLS = 3
DEPTH = 24


def stack(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Deep enough for working memory to be small beside it."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(DEPTH)])


def sizes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[BlockSizes]:
    known = optimizer.state_sizes() if isinstance(optimizer, HostOptimizer) else {}
    return [
        BlockSizes(
            weights=sum(-(-each.nbytes // 512) * 512 for each in block.parameters()),
            staging=0,
            gradients=tuple(each.nbytes for each in block.parameters()) if known else (),
            state=tuple(size for each in block.parameters() for size in known.get(each, ())),
        )
        for block in model.children()
    ]


def budget_for(model: nn.Module, optimizer: torch.optim.Optimizer | None, *, weights: int) -> int:
    """The largest budget with which so many blocks have their weights on the disk."""
    every = sizes(model, optimizer)
    low, high = 0, 10 * sum(each.weights + sum(each.state) for each in every)
    while low + 1 < high:
        middle = (low + high) // 2
        try:
            found = len(choose(every, middle, fills=FILLS).weights)
        except hydra_ext.errors.HostBudgetTooSmall:
            found = DEPTH + 1
        low, high = (low, middle) if found < weights else (middle, high)
    return low


@contextmanager
def offloaded(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    folder: Path,
    *,
    weights: int = DEPTH,
    files: FaultyFiles | None = None,
    **options: Any,
) -> Iterator[Run]:
    context = hydra_ext.offload(
        model,
        optimizer,
        budget=DEVICE_BUDGET,
        host_budget=budget_for(model, optimizer, weights=weights),
        spill_dir=folder,
        blocks=list(model.children()),
        device=SimulatedDevice(),
        checks=Checks(poison_hosts=True, spill_files=files),
        **options,
    )
    with context as run:
        assert run.core.disk_fills == FILLS
        yield run
        assert run.report().windows > 0
    assert not list(folder.iterdir())
    for parameter in model.parameters():
        parameter.data_ptr()  # its own bytes, on the host


def pair(name: str = "adamw", dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any, Any]:
    plain, model = stack(dtype), stack(dtype)
    return plain, OPTIMIZERS[name](plain.parameters()), model, OPTIMIZERS[name](model.parameters())


@pytest.mark.parametrize("weights", [1, 11, DEPTH])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loop_gives_the_bits_of_the_plain_one(name: str, weights: int, tmp_path: Path) -> None:
    plain, theirs, model, ours = pair(name)
    expected = train(plain, theirs)
    with offloaded(model, ours, tmp_path, weights=weights) as run:
        seen = train(model, ours)
        assert run.report().disk_weight_bytes > 0
    assert_same(expected, seen)
    assert_same(state(plain, theirs), state(model, ours))
