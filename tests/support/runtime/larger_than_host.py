"""Trains a model of several times the host's budget from the disk, or plainly, and prints the outcome as JSON.

Run as ``python -m support.runtime.larger_than_host [FOLDER]`` by observe(), in a process of its own. The process ends
without leaving the context, which would bring the whole model to the host.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.checkpoint.checkpoint_memory import growth, status

if TYPE_CHECKING:
    from torch import Tensor, nn

DEPTH, WIDTH, STEPS, ROWS = 48, 768, 3, 8
WEIGHT = 4 * WIDTH * WIDTH  # of one layer, in bytes
WEIGHTS_ON_DISK = WEIGHT + 4096  # of one layer, with its bias
WHOLE = DEPTH * 4 * (WEIGHT + 4 * WIDTH)  # weights, gradients, two moments
HOST_BUDGET = 43_000_000  # the layers' working memory needs nearly as much
DEVICE_BUDGET = 2**24  # the device's memory is host memory, too
CONSTANT = 10 * 2**20  # 3 are used: copies of the weight that is hashed and of one that moves, graphs, small pieces

THREADS = 8  # threads of the run and of autograd
_STACK = 2**20  # bytes of a thread's stack, which count fully as address space


@dataclass
class Outcome:
    """The outcome of a training.

    Attributes:
        losses: Losses, exact to the last bit.
        sums: Hashes of each weight and of its moments after the last step.
        peak: Peak host memory of the process in bytes, above its memory before the model was made.
        read, spared, written: Bytes of the disk until the last update had finished: those that were read, those that
            fills did not need to read, and those that were written.
        loads: Number of loads of blocks to the device.
        on_disk, weights: Bytes on the disk, and bytes of weights among them.
    """

    losses: list[str]
    sums: list[str]
    peak: int = 0
    read: int = 0
    spared: int = 0
    written: int = 0
    loads: int = 0
    on_disk: int = 0
    weights: int = 0


def observe(folder: Path | None) -> Outcome:
    """Trains from the disk, with only as much address space as the budgets allow; or plainly without a folder."""
    return Outcome(**outcome_of("support.runtime.larger_than_host", folder))


def outcome_of(module: str, folder: Path | None) -> dict[str, Any]:
    """Runs a module in a process of its own, whose memory is as it says. Returns the JSON of its last line."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *([str(folder)] if folder else [])],
        # Otherwise malloc keeps freed memory, in an amount that depends on the past, and maps memory for threads. What
        # the layers save is 24 KiB each: glibc does not use a freed block of theirs for another one beside it.
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "MALLOC_MMAP_THRESHOLD_": "16384",
            "MALLOC_ARENA_MAX": "1",
        },
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (_STACK, resource.RLIM_INFINITY)),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def limit_address_space(room: int) -> None:
    """Makes it an error to map more than so many bytes beyond what is mapped now."""
    most = status("VmSize") + room + THREADS * _STACK
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def _build(width: int, depth: int) -> nn.Sequential:
    from torch import nn
    from torch.nn import functional

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0.1 * functional.gelu(super().forward(x))

    return nn.Sequential(*[Layer(width, width) for _ in range(depth)])


def _train(model: nn.Module, optimizer: Any, width: int) -> list[str]:
    import torch

    from hydra_ext import optim

    losses = []
    for step in range(STEPS):
        batch = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(step))
        loss = model(batch).square().mean()
        loss.backward()
        optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())
    return losses


def _sums(model: nn.Module, optimizer: Any, read: Callable[[Tensor], Tensor | None]) -> list[str]:
    """Hashes one tensor after the other."""
    found = []
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"]):
            there = read(tensor)
            found.append(hashlib.sha256((tensor if there is None else there).detach().numpy()).hexdigest())
            del there
    return found


def _plainly() -> Outcome:
    import torch

    from hydra_ext.optim import AdamW

    torch.manual_seed(0)
    model = _build(WIDTH, DEPTH)
    optimizer = AdamW(model.parameters(), lr=1e-4)
    return Outcome(_train(model, optimizer, WIDTH), _sums(model, optimizer, lambda _: None))


def _enter(folder: Path, width: int, depth: int, *, budget: int, host_budget: int) -> tuple[Any, Any, Any]:
    """Makes a model that was never whole in memory and its optimizer, and enters the context."""
    import torch

    import hydra_ext
    from hydra_ext.optim import AdamW

    torch.manual_seed(0)
    model: Any = hydra_ext.materialize(lambda: _build(width, depth))
    optimizer = AdamW(model.parameters(), lr=1e-4)
    context = hydra_ext.offload(
        model,
        optimizer,
        budget=budget,
        host_budget=host_budget,
        spill_dir=folder,
        blocks=list(model.children()),
        device="simulated",
    )
    return model, optimizer, context


def _from_disk(folder: Path) -> Outcome:
    """Trains from the disk. The context stays open."""
    model, optimizer, context = _enter(folder, WIDTH, DEPTH, budget=DEVICE_BUDGET, host_budget=HOST_BUDGET)
    run = context.__enter__()
    _open.append(context)
    losses = _train(model, optimizer, WIDTH)
    run.core.update.finish()
    disk = run.core.homes.disk.statistics
    seen = Outcome(losses, _sums(model, optimizer, run.core.moves.read_from_disk))  # waits for writes under way
    report = run.report()
    seen.read, seen.spared = disk.read_bytes, disk.spared_bytes
    seen.written, seen.loads = report.disk_written_bytes, report.loads
    seen.on_disk, seen.weights = report.disk_bytes, report.disk_weight_bytes
    return seen


_open: list[Any] = []


def _warm_up(folder: Path) -> None:
    """Makes libraries and the engine allocate their permanent memory."""
    model, optimizer, context = _enter(folder, 256, 8, budget=2**20, host_budget=2**23)
    with context:
        _train(model, optimizer, 256)


def _main() -> None:
    import torch

    torch.set_num_threads(1)
    if len(sys.argv) == 1:
        print(json.dumps(asdict(_plainly())))
        return
    folder = Path(sys.argv[1])
    _warm_up(folder)
    gc.collect()
    limit_address_space(HOST_BUDGET + DEVICE_BUDGET + CONSTANT)
    found: list[Outcome] = []
    peak = growth(lambda: found.append(_from_disk(folder)))
    print(json.dumps({**asdict(found[0]), "peak": peak}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    _main()
