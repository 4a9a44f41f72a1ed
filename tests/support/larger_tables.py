"""Trains tables of ten times the host's budget from the disk, or plainly, and prints the outcome as JSON.

Run as ``python -m support.larger_tables [FOLDER]`` by observe(), in a process of its own. The process ends without
leaving the context, which would bring all tables to the host.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.checkpoint.checkpoint_memory import growth
from support.runtime.larger_than_host import limit_address_space, outcome_of

if TYPE_CHECKING:
    from torch import Tensor, nn

TABLES, ROWS, WIDTH, BATCH, STEPS = 8, 40_000, 64, 32, 70  # beyond the 64 steps that a row may be behind
TABLE = ROWS * WIDTH * 4
WHOLE = TABLES * 3 * TABLE  # with two moments
HOST_BUDGET = WHOLE // 12
DEVICE_BUDGET = 2**22  # the device's memory is host memory, too
MOST = HOST_BUDGET + DEVICE_BUDGET + TABLE  # a table is filled as a whole
ROOM = MOST + TABLE + 10 * 2**20  # of address space: copies of the tensor that is hashed, stacks, small pieces


@dataclass
class Outcome:
    """The outcome of a training.

    Attributes:
        losses: Losses, exact to the last bit.
        sums: Hashes of each table and of its moments after the last step.
        peak: Peak host memory of the process in bytes, above its memory before the model was made.
        on_disk: Bytes on the disk at the end.
        whole_reads: Times that a whole tensor came to the host.
    """

    losses: list[str]
    sums: list[str]
    peak: int = 0
    on_disk: int = 0
    whole_reads: int = 0


def observe(folder: Path | None) -> Outcome:
    """Trains from the disk, with only as much address space as the budgets allow; or plainly without a folder."""
    return Outcome(**outcome_of("support.larger_tables", folder))


def _build(tables: int, rows: int) -> nn.Module:
    import torch
    from torch import nn

    class Recommender(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.EmbeddingBag(rows, WIDTH, mode="sum") for _ in range(tables))
            self.top = nn.Linear(tables * WIDTH, 1)

        def forward(self, indices: Tensor) -> Tensor:
            found: Tensor = self.top(torch.cat([table(indices) for table in self.tables], dim=1))
            return found

    return Recommender()


def _train(model: nn.Module, optimizer: Any, rows: int, steps: int) -> list[str]:
    import torch

    losses = []
    for step in range(steps):
        indices = torch.randint(0, rows, (BATCH, 2), generator=torch.Generator().manual_seed(step))
        loss = model(indices).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())
    return losses


def _sums(model: Any, optimizer: Any, read: Any) -> list[str]:
    """Hashes one tensor after the other."""
    found = []
    for number, table in enumerate(model.tables):
        for name in (None, "exp_avg", "exp_avg_sq"):
            tensor = table.weight if name is None else optimizer.state[table.weight][name]
            there = read(number, tensor)
            found.append(hashlib.sha256((tensor if there is None else there).detach().numpy()).hexdigest())
            del there
    return found


def _plainly() -> Outcome:
    import torch

    from hydra_ext.optim import AdamW

    torch.manual_seed(0)
    model = _build(TABLES, ROWS)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    return Outcome(_train(model, optimizer, ROWS, STEPS), _sums(model, optimizer, lambda *_: None))


def _from_disk(folder: Path, tables: int, rows: int, steps: int) -> Outcome:
    """Trains a model that was never whole in memory. The context stays open."""
    import torch

    import hydra_ext
    from hydra_ext.optim import AdamW

    torch.manual_seed(0)
    model: Any = hydra_ext.materialize(lambda: _build(tables, rows))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    context = hydra_ext.offload(
        model,
        optimizer,
        budget=DEVICE_BUDGET,
        host_budget=tables * 3 * rows * WIDTH * 4 // 12,
        spill_dir=folder,
        device="simulated",
    )
    run = context.__enter__()
    _open.append(context)
    losses = _train(model, optimizer, rows, steps)
    homes: list[Any] = [table.disk for table in run.tables]
    sums = _sums(model, optimizer, lambda number, tensor: homes[number].copy(tensor))
    report: Any = run.report().tables
    return Outcome(losses, sums, 0, report.disk.nbytes, sum(home.whole_reads for home in homes))


_open: list[Any] = []


def _main() -> None:
    import torch

    torch.set_num_threads(1)
    if len(sys.argv) == 1:
        print(json.dumps(asdict(_plainly())))
        return
    folder = Path(sys.argv[1])
    _from_disk(folder, TABLES, ROWS // 4, 2)  # makes libraries and the engine allocate their permanent memory
    _open.pop().__exit__(None, None, None)
    gc.collect()
    limit_address_space(ROOM)
    found: list[Outcome] = []
    peak = growth(lambda: found.append(_from_disk(folder, TABLES, ROWS, STEPS)))
    print(json.dumps({**asdict(found[0]), "peak": peak}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    _main()
