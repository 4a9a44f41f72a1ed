"""A model of layers and a head, its microbatches and its loss, for tests of plans."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, ROWS = 64, 96


class Layered(nn.Module):
    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def data(count: int) -> list[Tensor]:
    return list(torch.randn(count, ROWS, WIDTH, generator=torch.Generator().manual_seed(2)))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return functional.cross_entropy(y, torch.arange(len(y), device=y.device) % 8)
