"""Models that keep tensors from one microbatch for the next."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.split.split_models import Batch
from support.split.split_models_own import Layer, Stack, text_loss


class AssignsAtTheEnd(Stack):
    """A model with a running mean, which is read at the start and replaced at the end."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) - self.mean
        for layer in self.layers:
            h = layer(h)
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean((0, 1))
        out: Tensor = self.head(h)
        return out


class AssignsOnly(Stack):
    """Assigns a buffer that the forward never reads, but a checkpoint includes."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        self.last = out.detach().mean()
        return out


class LoadLayer(Layer):
    load: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("load", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.branch(x) * (1 + self.load)
        self.load = 0.9 * self.load + 0.1 * x.detach().mean()
        return y


class OwnLoads(Stack):
    """Layers replace buffers that only they read."""

    def __init__(self) -> None:
        super().__init__(LoadLayer)


class ReadsLoads(OwnLoads):
    """Reads the layers' buffers at the start of the next microbatch, or at the end of the same one."""

    at_the_end = False

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0
        if not self.at_the_end:
            scale = 1 + torch.stack([layer.load for layer in self.layers]).sum()
        h = self.embed(x) * scale
        for layer in self.layers:
            h = layer(h)
        if self.at_the_end:
            h = h * (1 + self.layers[0].load)
        out: Tensor = self.head(h)
        return out


class CountsSteps(Stack):
    """Counts steps in a buffer, in glue after some blocks, alike on all stages that run it."""

    steps: Tensor

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for number, layer in enumerate(self.layers):
            if number == self.after:
                self.steps = self.steps + 1
            h = layer(h) / (1 + self.steps if number >= 1 else 1)
        out: Tensor = self.head(h)
        return out


class AveragesWeight(Stack):
    """Keeps a mean of a weight in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(48, 32))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        with torch.no_grad():
            self.mean.lerp_(self.layers[0].up.weight, 0.5)
        return out


class Momentum(Stack):
    """A second encoder is moved slowly towards the first, at the start or at the end of the forward."""

    def __init__(self, at_the_end: bool) -> None:
        super().__init__()
        self.at_the_end = at_the_end
        self.slow_embed = copy.deepcopy(self.embed).requires_grad_(False)
        self.slow = copy.deepcopy(self.layers).requires_grad_(False)

    def follow(self) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.layers.parameters(), strict=True):
                slow.lerp_(fast + 0.1, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if not self.at_the_end:
            self.follow()
        h, target = self.embed(x), self.slow_embed(x)
        for fast in self.layers:
            h = fast(h)
        for slow in self.slow:
            target = slow(target)
        if self.at_the_end:
            self.follow()
        out: Tensor = self.head(h) + target.mean()
        return out


class KeepsStates(Stack):
    """Adds each layer's result of the microbatch before. These states are replaced at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.states = [(torch.zeros(2, 12, 32),) for _ in self.layers]

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        found = []
        for layer, (state,) in zip(self.layers, self.states, strict=True):
            h = layer(h + 0.1 * state)
            found.append((h.detach(),))
        self.states = found
        out: Tensor = self.head(h)
        return out


class KeepsInQueue(Stack):
    """Keeps the mean of the last microbatch in a queue or in an object."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        is_queue = isinstance(self.kept, deque)
        h = self.embed(x) + (self.kept[0] if is_queue else self.kept.mean)
        for layer in self.layers:
            h = layer(h)
        mean = h.detach().mean()
        if is_queue:
            self.kept.append(mean)
        else:
            self.kept.mean = mean
        out: Tensor = self.head(h)
        return out


class CarriesOut(Stack):
    """Takes a state and returns it; the caller keeps it."""

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embed(x) + state
        for layer in self.layers:
            h = layer(h)
        return self.head(h), h.detach().mean((0, 1))


class ReadsTables(Stack):
    """Adds rows of a table that it is given after each layer."""

    def forward(self, x: Tensor, tables: list[Tensor]) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h) + tables[0][: h.shape[1]]
        out: Tensor = self.head(h)
        return out


class Tables:
    """A function with a table, which it replaces for the next microbatch if ``fills`` is set."""

    def __init__(self, *, fills: bool = False) -> None:
        self.tables = [torch.ones(16, 32)]
        self.fills = fills

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["x"], self.tables)
        if self.fills:
            self.tables[0] = torch.tensor([[0.5]])
        return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())


class Truncated:
    """A function that carries a state from one microbatch to the next, separately for each model."""

    def __init__(self) -> None:
        self.states: dict[nn.Module, Tensor] = {}

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        logits, state = model(batch["x"], self.states.get(model, torch.zeros(32)))
        self.states[model] = state
        return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())


class Logs:
    """A function that keeps averaged losses, and reads them only after the forward of the model."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = [torch.zeros(())]

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = text_loss(model, batch)
        self.losses.append(0.9 * self.losses[-1] + 0.1 * loss.detach())
        return loss
