"""Models with their own checkpoints, which read or write the model's state."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.split.split_models_own import Layer, Stack


class CheckpointedLayer(Layer):
    """Counts its calls in an attribute and in a buffer, which its checkpoint reads. A hook notes gradients."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("kept", torch.zeros(()))
        self.noted = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.kept += 0.5
        out: Tensor = checkpoint(self.again, x, use_reentrant=self.reentrant)
        if out.requires_grad:
            out.register_hook(self.note)
        return out

    def note(self, gradient: Tensor) -> None:
        self.noted = float(gradient.sum())

    def again(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.branch(x) * (self.calls + self.kept))


class ReentrantLayer(CheckpointedLayer):
    reentrant = True


class CheckpointsLayers(Stack):
    """Counts before its first layer, and reads the count in each layer's checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.embed(x)
        for layer in self.layers:
            h = checkpoint(self.again, layer, h, use_reentrant=False)
        out: Tensor = self.head(h)
        return out

    def again(self, layer: nn.Module, h: Tensor) -> Tensor:
        return torch.tanh(layer(h) * (1 + 0.5 * self.calls))


class CountsAtItsEnd(Stack):
    """The checkpoint at its end counts, in forward and in backward, and reads the count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.ends = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        out: Tensor = checkpoint(self.end, h, use_reentrant=False)
        return out

    def end(self, h: Tensor) -> Tensor:
        self.ends += 1
        return torch.tanh(self.head(h) * (self.calls + self.ends))


class Normed(Layer):
    """A layer whose checkpoint writes statistics, in forward and in backward."""

    checkpoints = True

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(32)

    def branch(self, x: Tensor) -> Tensor:
        out: Tensor = self.statistics(super().branch(x).flatten(0, 1)).view_as(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False) if self.checkpoints else super().forward(x)
        return out


class NormedOnce(Normed):
    checkpoints = False


CHECKPOINTED: dict[str, Callable[[], nn.Module]] = {
    "layer's checkpoint reads": lambda: Stack(CheckpointedLayer),
    "layer's reentrant checkpoint reads": lambda: Stack(ReentrantLayer),
    "checkpoint between layers reads": CheckpointsLayers,
    "checkpoint at the end writes": CountsAtItsEnd,
    "checkpoints write statistics": lambda: Stack(Normed),
    "statistics without checkpoints": lambda: Stack(NormedOnce),
}
