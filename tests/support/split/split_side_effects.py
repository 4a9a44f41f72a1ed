"""Models and functions that change more than gradients: counters, memory, random states, modes."""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hydra_ext.pipeline import Pipeline
from hydra_ext.split.stage_program import microbatch_seed
from support.pipeline.pipelines import sgd
from support.split.split_models import Batch
from support.split.split_models_own import Layer, Stack, text, text_loss
from support.split.stateful_models import CountingLayer

PIPELINE_SEED = 5
DOUBLED = 5  # the first token of microbatches that take the longer path


# ---- changes on the path --------------------------------------------------------------------------------------------
class Branching(Stack):
    """Some microbatches take a longer path, which shows only after the second layer."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for i, layer in enumerate(self.layers):
            h = layer(h)
            if i == 1 and bool(x[0, 0] == DOUBLED):
                h = h * 2
        out: Tensor = self.head(h)
        return out


def branching(layer: type[nn.Module]) -> Callable[[], nn.Module]:
    class Model(Branching):
        def __init__(self) -> None:
            super().__init__(layer)

    return Model


def both_ways(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    batches = [text(generator) for _ in range(count)]
    for number, batch in enumerate(batches):
        batch["x"][0, 0] = DOUBLED if number % 2 else DOUBLED - 1
    return batches


class CountsDeep(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Any] = {"a": [{"calls": 0}], "object": SimpleNamespace(calls=0)}

    def forward(self, x: Tensor) -> Tensor:
        self.state["a"][0]["calls"] += 1
        self.state["object"].calls += 1
        return x + self.branch(x) / (self.state["a"][0]["calls"] + self.state["object"].calls)


class Assigns(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.branch(x) - self.mean
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean((0, 1))
        return out


class AddsUp(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.add_(x.detach().mean((0, 1)))
        return x + self.branch(x) - self.mean


class Replaces(AddsUp):
    """As above, by a buffer that lies in other memory each time."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data = self.mean + x.detach().mean((0, 1))
        return x + self.branch(x) - self.mean


class Draws(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x) + torch.randn(x.shape[-1], generator=self.generator)


class ListMemory(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.memory = [[torch.zeros(())]]

    def forward(self, x: Tensor) -> Tensor:
        memory = self.memory[0][0]
        memory.add_(1)
        return x + self.branch(x) / memory


class HiddenMemory(Layer):
    """Keeps state in a closure, which no attribute path reaches."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.zeros(())
        self.memory = lambda: memory

    def forward(self, x: Tensor) -> Tensor:
        memory = self.memory()
        memory.add_(1)
        return x + self.branch(x) / memory


class StepsFirst(Branching):
    """Writes to a buffer before the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.step.add_(1)
        return super().forward(x) * self.step


class ChangesInput(Branching):
    def forward(self, x: Tensor) -> Tensor:
        x[:, 1:].add_(1).clamp_(max=31)
        return super().forward(x)


UNDONE: dict[str, Callable[[], nn.Module]] = {
    "counter": branching(CountingLayer),
    "nested counters": branching(CountsDeep),
    "assigned buffer": branching(Assigns),
    "buffer": branching(AddsUp),
    "buffer in other memory": branching(Replaces),
    "memory in a list": branching(ListMemory),
    "generator": branching(Draws),
    "buffer before the first block": StepsFirst,
}


# ---- generators -----------------------------------------------------------------------------------------------------
class Shared(Stack):
    """A model in which two layers draw from one generator."""

    def __init__(self, users: tuple[int, ...] = (1, 2)) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.users = users

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for i, layer in enumerate(self.layers):
            h = layer(h)
            if i in self.users:
                h = h + torch.randn(h.shape, generator=self.generator)
        out: Tensor = self.head(h)
        return out


def drawn_anew(model: nn.Module, batch: Batch) -> Tensor:
    """Makes the generator in each call, and draws before the first block and after the last one."""
    generator = torch.Generator().manual_seed(9)
    scale = torch.rand((), generator=generator)
    loss = text_loss(model, batch)
    return loss * (scale + torch.rand((), generator=generator))


# ---- modes ----------------------------------------------------------------------------------------------------------
class FrozenBelow(Stack):
    """Runs the first layers without gradients; a cut may lie between them."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad(), torch.profiler.record_function("frozen"):
            h = self.embed(x)
            for layer in self.layers[:3]:
                h = layer(h)
        h = self.layers[3](h)
        out: Tensor = self.head(h)
        return out


class FailsFrozen(FrozenBelow):
    """Raises an error in glue inside the context, once ``fails`` is set."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.layers[0](self.embed(x))
            h = h + 1
            if self.fails:
                raise KeyError("the user's own")
            h = h * 2
            h = self.layers[1](h)
        h = self.layers[2](h)
        out: Tensor = self.head(h)
        return out


# ---- microbatches that are no pytrees --------------------------------------------------------------------------------
class Encoding(UserDict[str, Tensor]):
    """A microbatch as a tokenizer returns it."""


@dataclass(frozen=True)
class Example:
    x: Tensor
    rest: dict[str, Tensor]


def encoded(batch: Batch) -> Encoding:
    return Encoding(batch)


def example(batch: Batch) -> Example:
    return Example(batch["x"], {"y": batch["y"]})


def encoded_loss(model: nn.Module, batch: Encoding) -> Tensor:
    assert isinstance(batch, Encoding)
    return text_loss(model, batch.data)


def example_loss(model: nn.Module, batch: Example) -> Tensor:
    return text_loss(model, {"x": batch.x, **batch.rest})


# ---- several processes ----------------------------------------------------------------------------------------------
class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def noisy(count: int) -> list[Tensor]:
    return [torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(number)) for number in range(count)]


def denoising(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Returns a loss function that draws noise from its own generator."""
    generator = torch.Generator().manual_seed(5)

    def loss(batch: Tensor) -> Tensor:
        noise = torch.randn(batch.shape, generator=generator)
        return F.mse_loss(model(batch + noise), noise)

    return loss


def mixing(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Returns a loss function that draws its share from numpy, and its partner from Python."""

    def loss(batch: Tensor) -> Tensor:
        share, place = float(np.random.beta(1.0, 1.0)), random.randrange(1, 6)
        other = batch.roll(place, 1)
        out = model(share * batch + (1 - share) * other)
        return share * F.mse_loss(out, batch) + (1 - share) * F.mse_loss(out, other)

    return loss


LOSSES: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {"denoising": denoising, "mixing": mixing}


@dataclass(frozen=True)
class Training:
    """A training of two steps of two microbatches in several processes."""

    loss: str
    cuts: tuple[str, ...] | None = None
    recompute: bool = False


def train(rank: int, cases: list[Training]) -> list[dict[str, Any]]:
    found = []
    for case in cases:
        torch.manual_seed(0)
        model = Denoiser()
        fn = LOSSES[case.loss](model)
        batches = noisy(4)
        random.seed(rank)
        np.random.seed(rank)
        with Pipeline(
            model, sgd, schedule="1f1b", microbatches=2, cuts=case.cuts, recompute=case.recompute, seed=PIPELINE_SEED
        ) as pipe:
            losses = [torch.stack(pipe.step(batches[i : i + 2], fn).losses) for i in (0, 2)]
            numbers = [random.random(), float(np.random.rand())]
        found.append({"losses": torch.cat(losses), "numbers": numbers})
    return found


def train_plainly(case: Training) -> Tensor:
    torch.manual_seed(0)
    model = Denoiser()
    fn = LOSSES[case.loss](model)
    optimizer = sgd(model.parameters())
    losses = []
    for number, batch in enumerate(noisy(4)):
        seed = microbatch_seed(PIPELINE_SEED, 0, number // 2, number % 2)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        losses.append(fn(batch))
        (losses[-1] / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses).detach()


def train_frozen(rank: int, cuts: list[str]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = FrozenBelow()
    generator = torch.Generator().manual_seed(1)
    batches = [text(generator) for _ in range(2)]
    with Pipeline(model, sgd, schedule="1f1b", microbatches=2, cuts=cuts, seed=PIPELINE_SEED) as pipe:
        losses = torch.stack(pipe.step(batches, lambda batch: text_loss(model, batch)).losses)
        return {"losses": losses, "grad mode": torch.is_grad_enabled()}
