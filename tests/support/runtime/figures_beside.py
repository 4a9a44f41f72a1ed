"""Trains in one thread while another reads the run's figures as fast as it can. Shows only that both threads end."""

from __future__ import annotations

import faulthandler
import threading

import torch
from torch import nn

import hydra_ext
from hydra_ext import SimulatedDevice, optim
from support.runtime.leaving import beside

WIDTH, LAYERS, STEPS = 16, 64, 100
_SECONDS = 120.0  # a deadlock lasts longer


def main() -> None:
    faulthandler.dump_traceback_later(_SECONDS, exit=True)
    torch.set_num_threads(1)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    ended = threading.Event()
    with hydra_ext.offload(
        model, optimizer, budget=60_000, blocks=list(model.children()), device=SimulatedDevice()
    ) as run:

        def look() -> None:
            core = run.core
            while not ended.is_set():
                for _ in range(100):
                    core.update.seconds  # noqa: B018
                    core.update.bytes  # noqa: B018
                run.report()

        with beside(look, until=ended):
            for _ in range(STEPS):
                model(torch.ones(4, WIDTH)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
