"""Models whose forwards write to state that they read: shared by layers, carried on, or left for other layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LAYERS = 3


class Plain(nn.Module):
    """A model; subclasses define the state of a layer.

    Args:
        shared: The state that all layers of a model share.
    """

    def __init__(self, width: int, shared: dict[str, Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.after = nn.Linear(width, width)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class SharedStatistics(Plain):
    def __init__(self, width: int, shared: dict[str, Any]) -> None:
        super().__init__(width, shared)
        self.norm = nn.BatchNorm1d(width)
        first = shared.setdefault("norm", self.norm)
        self.norm.running_mean, self.norm.running_var = first.running_mean, first.running_var

    def forward(self, x: Tensor) -> Tensor:
        self.norm(super().forward(x))
        return super().forward(x - self.norm.running_mean.clone())


class SharedAverage(Plain):
    """Keeps an average in a dictionary that all layers have."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.shared["mean"] = 0.9 * self.shared.get("mean", 0.0) + 0.1 * float(y.detach().float().mean())
        return y * (1 + self.shared["mean"])


class Carries(Plain):
    """Carries a recurrent state, which it reads before blocks and sets after them."""

    def __init__(self, width: int, shared: dict[str, Any], held: str) -> None:
        super().__init__(width, shared)
        self.held = held
        self.last: Any = None
        self.register_buffer("state", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.held == "attribute":
            y = self.after(self.linear(x if self.last is None else x + self.last))
            self.last = y.detach().mean(0)
            return y
        y = self.after(self.linear(x + self.state.clone()))
        self.state.copy_(y.detach().mean(0))
        return y


class Counts(Plain):
    """Counts before and between its blocks."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.linear(x) / self.calls
        self.calls += 1
        return torch.tanh(self.after(y)) / self.calls


class Draws(Plain):
    """Draws from a generator that all layers share."""

    def __init__(self, width: int, shared: dict[str, Any], kind: str) -> None:
        super().__init__(width, shared)
        made: dict[str, Callable[[], Any]] = {
            "torch": lambda: torch.Generator().manual_seed(1),
            "numpy": lambda: np.random.default_rng(1),
        }
        if kind not in shared:
            shared[kind] = made[kind]()
        self.generator = shared[kind]

    def forward(self, x: Tensor) -> Tensor:
        of_torch = isinstance(self.generator, torch.Generator)
        drawn = torch.rand(1, generator=self.generator) if of_torch else self.generator.random()
        return super().forward(x) * float(drawn)


class CheckpointedCount(Plain):
    """Counts in its forward, and again in its backward."""

    def __init__(self, width: int, shared: dict[str, Any]) -> None:
        super().__init__(width, shared)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        calls = self.calls
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return y * 0.9**calls

    def inner(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Leaves(Plain):
    """Leaves a value that the next layer reads."""

    def __init__(self, width: int, shared: dict[str, Any]) -> None:
        super().__init__(width, shared)
        self.register_buffer("seen", torch.zeros(width))
        self.before = [shared.get("last")]
        shared["last"] = self

    def forward(self, x: Tensor) -> Tensor:
        before = self.before[0]
        y = super().forward(x)
        y = y if before is None else y + before.seen
        self.seen.copy_(y.detach().mean(0))
        return y


class HookedSizes(Plain):
    """Hooks record sizes of gradients, which the next forward reads."""

    def __init__(self, width: int, shared: dict[str, Any]) -> None:
        super().__init__(width, shared)
        self.size = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * (1 + self.size)
        if y.requires_grad:
            y.register_hook(self.note)
        return y

    def note(self, gradient: Tensor) -> None:
        self.size = 0.5 * self.size + float(gradient.abs().sum())


class Stateful(nn.Module):
    def __init__(self, width: int, layer: Callable[[int, dict[str, Any]], nn.Module]) -> None:
        super().__init__()
        shared: dict[str, Any] = {}
        self.inner = nn.Linear(8, width)
        self.blocks = nn.ModuleList(layer(width, shared) for _ in range(LAYERS))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


LAYERS_OF: dict[str, Callable[[int, dict[str, Any]], nn.Module]] = {
    "shared statistics": SharedStatistics,
    "shared average": SharedAverage,
    "carried in an attribute": lambda width, shared: Carries(width, shared, "attribute"),
    "carried in a buffer": lambda width, shared: Carries(width, shared, "buffer"),
    "counts": Counts,
    "draws torch's": lambda width, shared: Draws(width, shared, "torch"),
    "draws numpy's": lambda width, shared: Draws(width, shared, "numpy"),
    "checkpointed count": CheckpointedCount,
    "left for others": Leaves,
    "hooked sizes": HookedSizes,
}
