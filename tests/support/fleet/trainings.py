"""Models, data and mishaps that workers import by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import Job

WIDTH = 24


class Layered(nn.Module):
    """A chain of blocks with running statistics, and a head."""

    def __init__(self, width: int, blocks: int, dropout: float, normed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, width),
                nn.BatchNorm1d(width) if normed else nn.LayerNorm(width),
                nn.ReLU(),
                nn.Dropout(dropout),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


def layered(width: int = WIDTH, blocks: int = 4, dropout: float = 0.0, normed: bool = True) -> nn.Module:
    return Layered(width, blocks, dropout, normed)


class Adapter(nn.Module):
    """A frozen layer, with the product of two small matrices beside it."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.down = nn.Parameter(torch.zeros(rank, width))
        self.up = nn.Parameter(torch.zeros(width, rank))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.base(x) + x @ self.down.T @ self.up.T)


class Adapted(nn.Module):
    """Layers with adapters and dropout, and a head for each job.

    Args:
        counts: Whether the output depends on the number of calls.
    """

    def __init__(self, width: int, blocks: int, rank: int, dropout: float, counts: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapter(width, rank) for _ in range(blocks))
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(width)
        self.counts = counts
        self.calls = 0
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls += 1
        x = x * (1 + 1e-3 * self.calls)
        for layer in self.layers:
            x = self.dropout(layer(x))
        found: Tensor = self.head(self.norm(x))
        return found


def adapted(
    width: int = WIDTH,
    blocks: int = 6,
    rank: int = 4,
    dropout: float = 0.0,
    base: int | None = 7,
    counts: bool = False,
) -> nn.Module:
    """A model whose base is drawn with a seed of its own, as if it were read from a file; None for the job's seed."""
    with torch.random.fork_rng(enabled=base is not None):
        if base is not None:
            torch.manual_seed(base)
        model = Adapted(width, blocks, rank, dropout, counts)
    model.layers.requires_grad_(False)
    model.norm.requires_grad_(False)
    for layer in model.layers:
        for matrix in (layer.down, layer.up):  # type: ignore[union-attr]
            nn.init.normal_(matrix.requires_grad_(True), std=0.1)  # type: ignore[union-attr,arg-type]
    nn.init.normal_(model.head.weight, std=0.1)
    return model


def batches(width: int = WIDTH, steps: int = 5, microbatches: int = 2) -> list[list[tuple[Tensor, Tensor]]]:
    """Drawn from torch's own generator: its seed is the job's."""
    return [[(torch.randn(6, width), torch.randint(0, 5, (6,))) for _ in range(microbatches)] for _ in range(steps)]


class Stream:
    """An iterable whose batches are drawn when they are asked for. It raises at the end if it is told so."""

    def __init__(self, steps: int, *, fails: bool = False) -> None:
        self._steps = steps
        self._fails = fails

    def __iter__(self) -> Iterator[Any]:
        for step in range(self._steps + self._fails):
            if step == self._steps:
                raise OSError("the data cannot be read")
            yield [(torch.randn(6, WIDTH), torch.randint(0, 5, (6,)))]


def loss(model: nn.Module, microbatch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(microbatch[0]), microbatch[1])


def evaluation() -> list[tuple[Tensor, Tensor]]:
    """Drawn from torch's own generator: its seed is the job's."""
    return [(torch.randn(6, WIDTH), torch.randint(0, 5, (6,))) for _ in range(3)]


def no_evaluation() -> list[tuple[Tensor, Tensor]]:
    return []


def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def job(name: str, *, lr: float = 1e-2, steps: int = 12, dropout: float = 0.0, **options: Any) -> Job:
    given: dict[str, Any] = {
        "model": partial(layered, dropout=dropout),
        "optimizer": partial(torch.optim.AdamW, lr=lr),
        "data": batches,
        "loss": loss,
        "schedule": falling,
        "evaluate": evaluation,
        "max_norm": 0.5,
    }
    return Job(name, steps=steps, **{**given, **options})


# ---- mishaps: what they do, they do once for each token in a folder -------------------------------------------------


def _takes(folder: str) -> bool:
    """Whether there was a token, which is gone now."""
    for path in sorted(Path(folder).iterdir()):
        try:
            path.unlink()
        except FileNotFoundError:
            continue
        return True
    return False


def mishap(model: nn.Module, microbatch: tuple[Tensor, Tensor], *, what: str, folder: str, after: int) -> Tensor:
    """The loss, or a mishap once this process has made ``after`` calls."""
    mishap.calls = getattr(mishap, "calls", 0) + 1  # type: ignore[attr-defined]
    if mishap.calls > after and torch.is_grad_enabled() and _takes(folder):  # type: ignore[attr-defined]
        if what == "raise":
            raise RuntimeError("the loss has had a mishap")
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            time.sleep(60)
    return loss(model, microbatch)


def slow_judge(model: nn.Module, microbatch: tuple[Tensor, Tensor], *, seconds: float = 0.9) -> Tensor:
    """The loss, which takes its time in evaluations."""
    if not torch.is_grad_enabled():
        time.sleep(seconds)
    return loss(model, microbatch)


def tokens(folder: Path, count: int) -> str:
    folder.mkdir()
    for number in range(count):
        (folder / str(number)).touch()
    return str(folder)


# ---- the plain loop -------------------------------------------------------------------------------------------------


def plainly(job: Job, *, threads: int) -> tuple[dict[str, Tensor], list[float], float | None]:
    """Weights, losses and evaluation of a job in plain PyTorch, as its documentation says."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _plainly(job)
    finally:
        torch.set_num_threads(before)


def _plainly(job: Job) -> tuple[dict[str, Tensor], list[float], float | None]:
    import random

    import numpy

    def seeded(seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)

    seeded(job.seed)
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    schedule = None if job.schedule is None else job.schedule(optimizer)
    seeded(hydra_ext.fleet.job.seed_of(job.seed, "data"))
    data: Any = job.data()
    iterator: Iterator[Any] = iter(())
    losses = []
    for step in range(job.steps):
        if isinstance(data, list):
            microbatches = data[step % len(data)]
        else:
            seeded(hydra_ext.fleet.job.seed_of(job.seed, "batch", step))
            microbatches = next(iterator, None)
            if microbatches is None:
                iterator = iter(data)
                microbatches = next(iterator)
        total = []
        for microbatch, seed in zip(microbatches, job.seeds(step, len(microbatches)), strict=True):
            torch.manual_seed(seed)
            value = job.loss(model, microbatch)
            (value / len(microbatches)).backward()
            total.append(value.detach())
        if job.max_norm is not None:
            ours = isinstance(optimizer, hydra_ext.optim.AdamW)
            (hydra_ext.optim if ours else nn.utils).clip_grad_norm_(model.parameters(), job.max_norm)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()
        losses.append(float(torch.stack(total).mean()))
    evaluated = None
    if job.evaluate is not None:
        seeded(hydra_ext.fleet.job.seed_of(job.seed, "evaluation"))
        model.eval()
        with torch.no_grad():
            evaluated = float(torch.stack([job.loss(model, each) for each in job.evaluate()]).mean())
    return model.state_dict(), losses, evaluated


def loaded(folder: Path, job: Job) -> dict[str, Tensor]:
    model = job.model()
    hydra_ext.load_model(folder, model)
    return model.state_dict()
