"""Models that keep state from one microbatch to the next, in every place where a module can."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hydra_ext.pipeline import Pipeline
from support.pipeline.pipelines import sgd
from support.split.checkpointed_models import CHECKPOINTED
from support.split.split_models import Batch
from support.split.split_models_own import Layer, Stack, text, text_loss

STEPS, MICROBATCHES = 3, 2
CUTS = {2: ["layers.2"], 4: ["layers.0", "layers.2", "head"]}  # by the number of stages


class CountsFirst(Stack):
    """Counts in a number before its first block."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = super().forward(x) * (1 + 0.1 * self.calls)
        return out


class CountsFirstInBuffer(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = super().forward(x) * (1 + 0.1 * self.calls)
        return out


class CountsBetween(Stack):
    """Writes to a buffer, and to a tensor in a list, after its second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.kept = [torch.zeros(())]

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for i, layer in enumerate(self.layers):
            h = layer(h)
            if i == 1:
                self.calls += 1
                self.kept[0] += 0.5
                h = h * (1 + 0.1 * self.calls) + self.kept[0]
        out: Tensor = self.head(h)
        return out


class KeepsList(Stack):
    """Appends to a list in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.lengths.append(x.shape[1])
        out: Tensor = super().forward(x) * len(self.lengths)
        return out


class AveragingLayer(Layer):
    """Keeps an average over microbatches in a tensor that is not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(32)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.branch(x) + self.average
        self.average = 0.5 * self.average + 0.5 * x.detach().mean((0, 1))
        return y


class AveragingLayerInPlace(AveragingLayer):
    def forward(self, x: Tensor) -> Tensor:
        y = x + self.branch(x) + self.average.clone()
        self.average.mul_(0.5).add_(0.5 * x.detach().mean((0, 1)))
        return y


class CountingLayer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.branch(x) / self.calls


class RemembersBetween(Stack):
    """Reads and sets an attribute of the module between two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for i, layer in enumerate(self.layers):
            h = layer(h)
            if i == 0:
                h = h + self.memory
                self.memory = h.detach().mean()
        out: Tensor = self.head(h)
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "counts first": CountsFirst,
    "counts first in a buffer": CountsFirstInBuffer,
    "counts between": CountsBetween,
    "keeps a list": KeepsList,
    "average": lambda: Stack(AveragingLayer),
    "average in place": lambda: Stack(AveragingLayerInPlace),
    "counting layer": lambda: Stack(CountingLayer),
    "remembers between": RemembersBetween,
}


# ---- counters in all places of a module ------------------------------------------------------------------------------
@dataclass(slots=True)
class Slotted:
    calls: int = 0


class Counter:
    def __init__(self) -> None:
        self.calls = 0


class CounterModule(nn.Module):
    calls = 0


class CounterDict(dict[str, int]):
    calls = 0


def in_attribute(held: Any) -> float:
    held.calls += 1
    return float(held.calls)


def in_member(held: Any) -> float:
    held[0] += 1
    return float(held[0])


def in_tensor(held: Any) -> float:
    held[0].add_(1)
    return float(held[0])


# A constructor of the counter, and a function that returns another number each time.
COUNTERS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "nested": (lambda: {"a": [0]}, lambda held: in_member(held["a"])),
    "space": (lambda: [SimpleNamespace(calls=0)], lambda held: in_attribute(held[0])),
    "object": (Counter, in_attribute),
    "slots": (Slotted, in_attribute),
    "dict with attributes": (CounterDict, in_attribute),
    "module in a list": (lambda: [CounterModule()], lambda held: in_attribute(held[0])),
    "array": (lambda: np.zeros(1), in_member),
    "tuple": (lambda: (torch.zeros(()),), in_tensor),
    "deep tensor": (lambda: SimpleNamespace(kept=[torch.zeros(())]), lambda held: in_tensor(held.kept)),
    "source": (lambda: np.random.default_rng(0), lambda held: float(held.random())),
    "generator": (lambda: torch.Generator().manual_seed(0), lambda held: float(torch.rand((), generator=held))),
}


class CountsInLayer(Layer):
    """Computes with the number that ``count(counter)`` returns. A test sets both attributes."""

    counter: Any = None
    count: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x) / (1 + self.count(self.counter))


# ---- trainings ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        changed: Whether counters and other state of the model are changed before the second step.
    """

    model: str
    stages: int
    schedule: str = "1f1b"
    recompute: bool = False
    changed: bool = False


def data() -> list[list[Batch]]:
    generator = torch.Generator().manual_seed(1)
    return [[text(generator) for _ in range(MICROBATCHES)] for _ in range(STEPS)]


def set_back(model: nn.Module) -> None:
    """Changes the model's state in every way in which users do between two steps."""
    calls: Any = getattr(model, "calls", None)
    if isinstance(calls, Tensor):
        calls.fill_(5)
    elif calls is not None:
        model.calls = 7  # type: ignore[assignment]
    if isinstance(model, KeepsList):
        model.lengths.clear()
    if isinstance(model, CountsBetween):
        model.kept[0].zero_()
    if isinstance(model, RemembersBetween):
        model.memory = torch.ones(())


def remembered(model: nn.Module) -> dict[str, Any]:
    """Returns the modules' state, by name."""
    shown: dict[str, Any] = {}
    for name, module in model.named_modules():
        for attribute in ("calls", "kept", "lengths", "average", "memory", "ends", "noted", "running_var"):
            if hasattr(module, attribute):
                value = getattr(module, attribute)
                shown[f"{name}.{attribute}"] = value.clone() if isinstance(value, Tensor) else value
    return shown


def train_all(rank: int, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Returns, for each case, losses, the modules' final state, buffers of the state_dict, and this rank's blocks."""
    results = []
    for case in cases:
        torch.manual_seed(0)
        model = (MODELS | CHECKPOINTED)[case.model]()
        losses = []
        with Pipeline(
            model,
            sgd,
            schedule=case.schedule,
            stages=case.stages,
            cuts=CUTS[case.stages],
            microbatches=MICROBATCHES,
            recompute=case.recompute,
            seed=5,
        ) as pipe:
            for step, batches in enumerate(data()):
                if case.changed and step == 1:
                    set_back(model)
                losses.append(torch.stack(pipe.step(batches, lambda b: text_loss(model, b)).losses))  # noqa: B023
            buffers = {name: t.clone() for name, t in pipe.state_dict().items() if "calls" in name}
            blocks = [block for stage in pipe._engine.assembly.parts.own for block in stage.program.events]
        results.append(
            {"losses": torch.stack(losses), "shown": remembered(model), "buffers": buffers, "blocks": blocks}
        )
    return results


def told_and_trained(rank: int, case: Case) -> dict[str, Any]:
    """Returns the results of a training, and the messages that were logged about checkpoints."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hydra_ext.pipeline.stages.remembered").addHandler(handler)
    return {**train_all(rank, [case])[0], "told": told}


def train_plainly(case: Case) -> dict[str, Any]:
    torch.manual_seed(0)
    model = (MODELS | CHECKPOINTED)[case.model]()
    optimizer = sgd(model.parameters())
    losses = []
    for step, batches in enumerate(data()):
        if case.changed and step == 1:
            set_back(model)
        found = []
        for batch in batches:
            found.append(text_loss(model, batch))
            (found[-1] / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(found).detach())
    return {"losses": torch.stack(losses), "shown": remembered(model)}
