"""The smallest budget at which a step runs in any mode, and trainings a little above it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import hydra_ext
from hydra_ext import Checks
from hydra_ext.errors import BudgetTooSmall
from support.rounds.squeezed import Subject

MICROBATCHES = 4
_CLOSE = 1.005  # the found budget is at most this many times the smallest
_ROOMY = 2**30


@dataclass(frozen=True)
class Mode:
    """How microbatches run; None lets the library choose."""

    size: int | None = None
    recompute: bool | None = None

    def __str__(self) -> str:
        if self.size is None:
            return "automatic"
        return f"rounds of {self.size}, {'recomputed' if self.recompute else 'kept'}"


AUTOMATIC = Mode()
EVERY_MODE = tuple(Mode(size, recompute) for size in range(1, MICROBATCHES + 1) for recompute in (True, False))


@dataclass(frozen=True)
class Trained:
    """The final state of a training."""

    losses: list[Tensor]
    state: dict[str, Tensor]
    report: hydra_ext.Report | None = None
    retries: tuple[int, ...] = ()  # after each step

    def equals(self, other: Trained) -> bool:
        same = all(torch.equal(a, b) for a, b in zip(self.losses, other.losses, strict=True))
        return same and all(torch.equal(value, other.state[name]) for name, value in self.state.items())


def _seeds(step: int) -> list[int]:
    return [1000 * step + index for index in range(MICROBATCHES)]


def _optimizer(model: torch.nn.Module) -> hydra_ext.optim.AdamW:
    return hydra_ext.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def _steps(subject: Subject, steps: int) -> Iterator[tuple[int, list[dict[str, Tensor]]]]:
    batches = subject.batches(steps * MICROBATCHES)
    for step in range(steps):
        yield step, batches[step * MICROBATCHES : (step + 1) * MICROBATCHES]


def _left(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train_plain(subject: Subject, steps: int) -> Trained:
    """Runs the loop that ``run.step`` stands for, with hydra_ext's optimizer only."""
    model = subject.make()
    optimizer = _optimizer(model)
    losses = []
    for step, batches in _steps(subject, steps):
        for seed, batch in zip(_seeds(step), batches, strict=True):
            torch.manual_seed(seed)
            loss = subject.loss(model, batch)
            (loss / MICROBATCHES).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, _left(model))


def train(subject: Subject, budget: int, mode: Mode, steps: int, *, poison: bool = True) -> Trained:
    """Trains with a budget and a mode, and no other options."""
    model = subject.make()
    losses, retries = [], []
    with hydra_ext.offload(model, _optimizer(model), budget=budget, checks=Checks(poison_hosts=poison)) as run:
        for step, batches in _steps(subject, steps):
            out = run.step(
                batches,
                lambda batch: subject.loss(model, batch),
                seeds=_seeds(step),
                round_size=mode.size,
                recompute=mode.recompute,
            )
            losses += list(out.losses)
            retries.append(run.report().retries)
        report = run.report()
    return Trained(losses, _left(model), report, tuple(retries))


def runs(subject: Subject, budget: int, mode: Mode, steps: int = 1) -> bool:
    try:
        train(subject, budget, mode, steps)
    except (torch.OutOfMemoryError, BudgetTooSmall):
        return False
    return True


def smallest(subject: Subject, told: Callable[[str], object] = lambda text: None) -> tuple[int, Mode]:
    """Returns the smallest budget at which one step runs in any mode, and that mode."""

    def mode_at(budget: int, first: Mode) -> Mode | None:
        modes = [first, *(mode for mode in EVERY_MODE if mode != first)]
        return next((mode for mode in modes if runs(subject, budget, mode)), None)

    best = EVERY_MODE[0]
    report = train(subject, _ROOMY, best, 1).report
    high = _ROOMY if report is None else report.peak_bytes
    while (found := mode_at(high, best)) is None:
        high *= 2
    best, low = found, high // 64
    while high > _CLOSE * low:
        middle = int((low * high) ** 0.5)
        found = mode_at(middle, best)
        told(f"{subject.name}: {middle} {found}")
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return high, best
