"""Allocations on a GPU that a process of its own makes, since its threads may lock each other out."""

from __future__ import annotations

from threading import Thread

import torch
from torch import nn

import hydra_ext
from hydra_ext import optim
from support.gpu import on_stream

_MIB = 2**20
_SECONDS = 4_000_000_000  # two, in cycles


def open_a_run_while_an_allocation_waits() -> None:
    """Both are made with the interpreter lock. The allocation waits for blocks at home, which leave late."""
    model, other = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]), nn.Linear(64, 64)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    with hydra_ext.offload(model, optimizer, budget=192 * _MIB, device="cuda", activations=None) as run:
        for _ in range(3):
            model(torch.ones(8, 1024)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert run.core.homes.statistics.settled > 0
        with on_stream(run._place._backend.to_host_stream):  # type: ignore[attr-defined]
            torch.cuda._sleep(_SECONDS)
        asking = Thread(target=torch.UntypedStorage, args=[160 * _MIB], kwargs={"device": "cuda"})
        asking.start()
        with hydra_ext.offload(other, None, budget=8 * _MIB, device="cuda"):
            pass
        asking.join()
        assert run.core.homes.statistics.returned > 0
