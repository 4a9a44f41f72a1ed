"""Allocations on a GPU that a process of its own makes, since its threads may lock each other out."""

from __future__ import annotations

from threading import Thread

import torch
from torch import nn

import hydra_ext
from support.gpu import on_stream

_MIB = 2**20


def open_a_run_while_an_allocation_waits() -> None:
    """Both are made with the interpreter lock. The allocation waits for a saved tensor that leaves late."""
    model, other = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]), nn.Linear(64, 64)
    with hydra_ext.offload(model, None, budget=64 * _MIB, device="cuda", activations=hydra_ext.Offload()) as run:
        x = torch.randn(2048, 1024)
        model(x).sum().backward()
        with on_stream(run._place._backend.to_host_stream):  # type: ignore[attr-defined]
            torch.cuda._sleep(2_000_000_000)
        loss = model(x).sum()
        asking = Thread(target=torch.UntypedStorage, args=[40 * _MIB], kwargs={"device": "cuda"})
        asking.start()
        with hydra_ext.offload(other, None, budget=8 * _MIB, device="cuda"):
            pass
        asking.join()
        loss.backward()
