"""Stages for benchmarks of pipelines: calibrated waits, and a small transformer."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SPIN = 2e-4  # seconds: a sleep may last that much longer than it was told to

ROWS, WIDTH = 4, 8  # of what crosses between waiting stages


def wait(seconds: float) -> None:
    """Without a core, but for the last moment, and without Python's lock."""
    deadline = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - _SPIN))
    while time.perf_counter() < deadline:
        time.sleep(0.0)


class Waiting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward: float, backward: float) -> Tensor:
        wait(forward)
        ctx.save_for_backward(x, weight)
        ctx.seconds = backward
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        wait(ctx.seconds)
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0), None, None


class WaitingStage(nn.Module):
    """Takes so many seconds forward, and so many backward."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.seconds = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        return Waiting.apply(x, self.weight, *self.seconds)


def mean_loss(output: Tensor, _: Tensor) -> Tensor:
    return output.mean()


def calibrated(stage: nn.Module, x: Tensor, *, count: int = 25) -> tuple[float, float]:
    """Medians of a forward's and a backward's seconds, outside any pipeline."""
    forwards, backwards = [], []
    for _ in range(count):
        start = time.perf_counter()
        y = stage(x)
        middle = time.perf_counter()
        y.sum().backward()
        forwards.append(middle - start)
        backwards.append(time.perf_counter() - middle)
    return statistics.median(forwards), statistics.median(backwards)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.places[: ids.shape[1]]


def transformer_stages(*, layers: int, width: int, length: int, vocabulary: int = 256) -> list[nn.Module]:
    """Two halves, the same numbers in every process."""
    torch.manual_seed(0)
    blocks = [Block(width) for _ in range(layers)]
    first = nn.Sequential(Embedding(vocabulary, length, width), *blocks[: layers // 2])
    last = nn.Sequential(*blocks[layers // 2 :], nn.LayerNorm(width), nn.Linear(width, vocabulary))
    return [first, last]


def token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
