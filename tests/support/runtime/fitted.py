"""Trainings whose activations are fitted into a budget, in ``run.step`` and in a plain loop, and their plain twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import hydra_ext
from hydra_ext import Checks, Offload, SimulatedDevice
from hydra_ext.activations.report import StashReport
from hydra_ext.errors import BudgetTooSmall
from hydra_ext.profile import Profile
from support.models.zoo import FAMILIES
from support.training import Recipe, build

MICROBATCHES, STEPS = 4, 3
ROOMY = 2**28
_CLOSE = 1.01  # the found budget is at most this many times the smallest
Batch = dict[str, Tensor]


class Convolutions(nn.Module):
    """Groups with BatchNorm and a ReLU that writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 16, 24)
        self.groups = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True), nn.MaxPool2d(2))
            for a, b in pairwise(widths)
        )
        self.head = nn.Linear(24 * 4 * 4, 10)

    def forward(self, pixels: Tensor, targets: Tensor) -> Tensor:
        for group in self.groups:
            pixels = group(pixels)
        return functional.cross_entropy(self.head(pixels.flatten(1)), targets)


class Tied(nn.Module):
    """A recurrent language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
            for _ in range(4)
        )
        self.head = nn.Linear(64, 96, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@dataclass(frozen=True)
class Subject:
    """A model and its inputs. ``batch`` draws ``rows`` times as much as one microbatch usually has."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().train()

    def batches(self, count: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(1)
        return [self.batch(generator) for _ in range(count)]


def _images(generator: torch.Generator) -> Batch:
    return {
        "pixels": torch.randn(4, 3, 32, 32, generator=generator),
        "targets": torch.randint(0, 10, (4,), generator=generator),
    }


def _tokens(generator: torch.Generator) -> Batch:
    return {"tokens": torch.randint(0, 96, (4, 24), generator=generator)}


SUBJECTS: dict[str, Subject] = {
    **{name: Subject(FAMILIES[name].build, FAMILIES[name].batch) for name in ("gpt2", "t5", "llama", "unet")},
    "convolutions": Subject(Convolutions, _images),
    "tied": Subject(Tied, _tokens),
    "lora": Subject(lambda: build(FAMILIES["llama"], Recipe(tuning="adapters")), FAMILIES["llama"].batch),
}


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    output = model(**batch)
    return output if isinstance(output, Tensor) else output.loss


@dataclass
class Left:
    """The losses of a training, and the numbers that it leaves."""

    losses: list[Tensor] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    report: hydra_ext.Report | None = None
    retries: list[int] = field(default_factory=list)  # after each step

    def differences(self, other: Left) -> list[str]:
        found = [
            f"loss {index}"
            for index, (a, b) in enumerate(zip(self.losses, other.losses, strict=True))
            if not torch.equal(a, b)
        ]
        return found + [name for name, value in self.state.items() if not torch.equal(value, other.state[name])]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return hydra_ext.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def seeds_of(step: int) -> list[int]:
    return [1000 * step + index for index in range(MICROBATCHES)]


def noted(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, batches: list[Batch]) -> list[Tensor]:
    losses = []
    for seed, batch in zip(seeds_of(step), batches, strict=True):
        torch.manual_seed(seed)
        loss = loss_of(model, batch)
        (loss / len(batches)).backward()
        losses.append(loss.detach().clone())  # some losses share the memory of more than themselves
    optimizer.step()
    optimizer.zero_grad()
    return losses


def steps_of(batches: list[Batch]) -> list[list[Batch]]:
    return [batches[first : first + MICROBATCHES] for first in range(0, len(batches), MICROBATCHES)]


def train_plain(subject: Subject, batches: list[Batch] | None = None) -> Left:
    model, left = subject.make(), Left()
    optimizer = optimizer_of(model)
    for step, given in enumerate(steps_of(batches or subject.batches(STEPS * MICROBATCHES))):
        left.losses += loop(model, optimizer, step, given)
    left.state = noted(model)
    return left


def train(
    subject: Subject,
    budget: int,
    *,
    looped: bool = False,
    batches: list[Batch] | None = None,
    device: SimulatedDevice | None = None,
    after_step: Callable[[hydra_ext.Run], object] = lambda run: None,
    **choices: Any,
) -> Left:
    """Trains under the default, with ``choices`` for ``run.step``, or in a loop."""
    model, left = subject.make(), Left()
    optimizer = optimizer_of(model)
    checks = Checks(poison_hosts=True)
    with hydra_ext.offload(model, optimizer, budget=budget, device=device or SimulatedDevice(), checks=checks) as run:
        for step, given in enumerate(steps_of(batches or subject.batches(STEPS * MICROBATCHES))):
            if looped:
                left.losses += loop(model, optimizer, step, given)
            else:
                out = run.step(given, lambda batch: loss_of(model, batch), seeds=seeds_of(step), **choices)
                left.losses += list(out.losses)
            left.retries.append(run.report().retries)
            after_step(run)
        left.report = run.report()
    left.state = noted(model)
    return left


def frugal(subject: Subject, budget: int) -> None:
    """One step by hand: nothing that is saved stays on the device, and microbatches run one at a time."""
    model = subject.make()
    optimizer = optimizer_of(model)
    with hydra_ext.offload(model, optimizer, budget=budget, device=SimulatedDevice(), activations=Offload()) as run:
        assert run._saving is not None
        run._saving.set_room(1)
        loop(model, optimizer, 0, subject.batches(MICROBATCHES))


def fits(training: Callable[[int], object], budget: int) -> bool:
    try:
        training(budget)
    except (torch.OutOfMemoryError, BudgetTooSmall):
        return False
    return True


def smallest(training: Callable[[int], object], low: int, high: int = ROOMY) -> int:
    """The smallest budget of a training, nearly. ``low`` is too small."""
    while high > _CLOSE * low:
        middle = int((low * high) ** 0.5)
        if fits(training, middle):
            high = middle
        else:
            low = middle
    return high


# ---- programs of a user ---------------------------------------------------------------------------------------------

Program = Callable[[nn.Module, torch.optim.Optimizer], list[Tensor]]


@dataclass
class Found:
    """What two runs of a program have left, one plain and one fitted.

    Attributes:
        recomputed: Names of the modules that the last plan has called again in backward.
        pieces: Names of those inside that it has called a third time.
        second_calls: Number of second calls of all modules.
        retries: Rounds that were undone.
        stash: The stash's report.
        planned: The last plan: what becomes of each segment.
    """

    plain: list[Tensor]
    fitted: list[Tensor]
    profile: Profile | None
    recomputed: list[str]
    pieces: list[str]
    second_calls: int
    retries: int
    model: Any
    stash: StashReport
    planned: dict[str, str]

    @property
    def equal(self) -> bool:
        return len(self.plain) == len(self.fitted) and all(map(torch.equal, self.plain, self.fitted))


def both(
    make: Callable[[], nn.Module],
    program: Program,
    *,
    budget: int,
    device: SimulatedDevice | None = None,
    activations: Any = "auto",
) -> Found:
    """Runs a program on a plain model, and on one whose activations are fitted. Compares all that it returns."""
    left = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        model = make().train()
        optimizer = optimizer_of(model)
        torch.manual_seed(1)
        if not offloaded:
            left.append([*program(model, optimizer), *noted(model).values()])
            continue
        options: Any = {"budget": budget, "device": device or SimulatedDevice(), "checks": Checks(poison_hosts=True)}
        options["activations"] = activations
        with hydra_ext.offload(model, optimizer, **options) as run:
            given = program(model, optimizer)
            report, fit = run.report(), run.fit
        left.append([*(each.cpu() for each in given), *noted(model).values()])
    assert report.activations is not None
    assert fit is not None
    stash, applied = report.activations, fit.applied
    recomputed, pieces = ([], []) if applied is None else (applied.recomputed, applied.pieces)
    planned = {} if applied is None else dict(zip(applied.names, (o.name for o in applied.options), strict=True))
    return Found(
        *left, fit.planner.profile, recomputed, pieces, stash.recomputed, report.retries, model, stash, planned
    )
