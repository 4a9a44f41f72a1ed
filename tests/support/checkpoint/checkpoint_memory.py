"""Saves and loads a model of 192 MiB with as much momentum, and prints the peaks of memory.

Run as ``python -m support.checkpoint.checkpoint_memory FOLDER`` by observe(), in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAYERS, WIDTH = 12, 2048
LAYER_BYTES = 4 * WIDTH * WIDTH


def observe(folder: Path) -> dict[str, int]:
    """Returns the growth of the process's peak memory in bytes, for each operation."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "support.checkpoint.checkpoint_memory", str(folder)],
        # Otherwise malloc keeps some freed memory, in an amount that depends on earlier allocations.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "MALLOC_MMAP_THRESHOLD_": "65536"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 2**10 * int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


def growth(work: Callable[[], Any]) -> int:
    """Measures the peak of this process's memory meanwhile, above its memory before."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def _main() -> None:
    import torch
    from torch import nn

    import hydra_ext

    torch.set_num_threads(1)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    model[3].weight = nn.Parameter(model[3].weight.detach().t())  # has to be copied to be written
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    folder = Path(sys.argv[1])
    found = {}
    with hydra_ext.offload(model, optimizer, budget=2**30) as run:
        run.save(folder / "first")  # allocates everything that is allocated only once
        found["save"] = growth(lambda: run.save(folder / "second"))
        found["load"] = growth(lambda: run.load(folder / "second"))
    found["load_model"] = growth(lambda: hydra_ext.load_model(folder / "second", model))
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
