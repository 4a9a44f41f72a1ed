"""Models that keep something from one microbatch for the next, or beside what their blocks return."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from support.split_models_own import Layer, Stack


class AssignsAtTheEnd(Stack):
    """A running mean, read at the start and replaced at the end."""

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
    """Nothing reads the buffer in the forward, but a checkpoint would have it."""

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
    """What the layers left in their buffers is read at the start of the next microbatch, or at the end of the same."""

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
    """A buffer that all stages would count alike, if they came there."""

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
    """A mean of a weight, kept in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(48, 32))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        with torch.no_grad():
            self.mean.lerp_(self.layers[0].up.weight, 0.5)
        return out


class Momentum(Stack):
    """A second, slow encoder follows the first, at the start or at the end of the forward."""

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
