"""A model so deep that all of it is on the disk if the host's budget is small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hydra_ext
from hydra_ext import Checks, Run, SimulatedDevice
from hydra_ext._C.testing import FaultyFiles
from hydra_ext.optim.host_optimizer import HostOptimizer
from hydra_ext.runtime.placement.spilling import BlockSizes, choose
from support.runtime.native import OPTIMIZERS, WIDTH

DEVICE_BUDGET = 2**19
WEIGHTS = 4 * WIDTH * WIDTH + 512  # bytes of one layer in a slot, with its bias
ON_DISK = -(-WEIGHTS // 4096) * 4096
GRADIENT = 4 * WIDTH * WIDTH  # bytes of one layer's weight; the gradient of the bias is too small for the disk
FILLS = 3
DEPTH = 24


def stack(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Makes a model so deep that working memory is small in comparison, in blocks that are worth a transfer."""
    torch.manual_seed(0)
    layers = 4 // dtype.itemsize
    blocks = [[nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(layers)] for _ in range(DEPTH)]
    return nn.Sequential(*[block[0] if layers == 1 else nn.Sequential(*block) for block in blocks])


def sizes(model: nn.Module, optimizer: torch.optim.Optimizer | None, staging: int = 0) -> list[BlockSizes]:
    known = optimizer.state_sizes() if isinstance(optimizer, HostOptimizer) else {}
    return [
        BlockSizes(
            weights=sum(-(-each.nbytes // 512) * 512 for each in block.parameters()),
            staging=staging,
            gradients=tuple(each.nbytes for each in block.parameters() if each.requires_grad and known),
            state=tuple(size for each in block.parameters() for size in known.get(each, ())),
        )
        for block in model.children()
    ]


def budget_for(model: nn.Module, optimizer: torch.optim.Optimizer | None, *, weights: int, staging: int = 0) -> int:
    """Returns the largest budget that keeps the weights of this many blocks on the disk."""
    every = sizes(model, optimizer, staging)
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
    budget: int = DEVICE_BUDGET,
    staging: int = 0,
    **options: Any,
) -> Iterator[Run]:
    context = hydra_ext.offload(
        model,
        optimizer,
        budget=budget,
        host_budget=budget_for(model, optimizer, weights=weights, staging=staging),
        spill_dir=folder,
        blocks=list(model.children()),
        device=SimulatedDevice(),
        checks=Checks(poison_hosts=True, spill_files=files),
        **options,
    )
    with context as run:
        assert run.core.homes.disk.fills == FILLS
        yield run
        assert run.report().windows > 0
    assert not list(folder.iterdir())
    for parameter in model.parameters():
        parameter.data_ptr()  # its own bytes, on the host


def pair(name: str = "adamw", dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any, Any]:
    plain, model = stack(dtype), stack(dtype)
    return plain, OPTIMIZERS[name](plain.parameters()), model, OPTIMIZERS[name](model.parameters())
