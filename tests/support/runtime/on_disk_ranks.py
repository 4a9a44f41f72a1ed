"""The work of ranks that train copies of a model on the disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

import hydra_ext
from hydra_ext import SimulatedDevice, errors
from hydra_ext.runtime.placement.spilling import choose
from support.runtime.native import BATCHES, state
from support.runtime.on_disk import DEPTH, DEVICE_BUDGET, FILLS, ON_DISK, pair, sizes


def smallest_budget() -> int:
    _, _, model, optimizer = pair()
    every = [replace(each, gradients=(), stays=sum(each.gradients)) for each in sizes(model, optimizer)]
    try:
        choose(every, 1, fills=FILLS)
    except errors.HostBudgetTooSmall as error:
        return error.smallest_budget
    raise AssertionError("one byte was enough")


def train_together(rank: int, folder: str | None) -> list[torch.Tensor]:
    """Trains by steps and plain loops in turn, on the rank's own data."""
    _, _, model, optimizer = pair()
    on_disk = {}
    if folder is not None:
        own = Path(folder) / str(rank)
        own.mkdir()
        on_disk = {"host_budget": smallest_budget(), "spill_dir": own}
    losses = []
    context = hydra_ext.offload(
        model, optimizer, budget=DEVICE_BUDGET, blocks=list(model.children()), device=SimulatedDevice(), **on_disk
    )
    with context as run:
        for number, batch in enumerate(BATCHES + rank):
            if number % 2 == 0:
                losses.append(run.step(batch.split(2), lambda part: model(part).pow(2).mean(), max_norm=0.1).loss)
                continue
            loss = model(batch).pow(2).mean()
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        assert run.report().disk_weight_bytes == (DEPTH * ON_DISK if folder is not None else 0)
    return [*losses, *state(model, optimizer)]
