"""The rules of hydra_ext.optim as ten lines of numpy each, in fp32 and in the documented order of operations."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.float32]
F = np.float32


@dataclass
class AdamRecurrence:
    weights: Numbers
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    step: int = 0
    m: Numbers = field(init=False)
    v: Numbers = field(init=False)

    def __post_init__(self) -> None:
        self.m, self.v = np.zeros_like(self.weights), np.zeros_like(self.weights)

    def update(self, g: Numbers) -> None:
        self.step += 1
        b1, b2 = self.betas
        if self.decoupled:
            self.weights = self.weights * F(1.0 - self.lr * self.weight_decay)
        elif self.weight_decay:
            g = g + self.weights * F(self.weight_decay)
        self.m = self.m + (g - self.m) * F(1.0 - b1)
        self.v = self.v * F(b2) + (g * F(1.0 - b2)) * g
        divisor = np.sqrt(self.v) * F(1.0 / np.sqrt(1.0 - b2**self.step)) + F(self.eps)
        self.weights = self.weights - (F(self.lr / (1.0 - b1**self.step)) * self.m) / divisor


@dataclass
class SgdRecurrence:
    weights: Numbers
    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    m: Numbers | None = None

    def update(self, g: Numbers) -> None:
        g = g + self.weights * F(self.weight_decay)
        if self.momentum:
            undamped = F(1.0 if self.m is None else 1.0 - self.dampening)
            self.m = (np.zeros_like(g) if self.m is None else self.m) * F(self.momentum) + g * undamped
            g = g + self.m * F(self.momentum) if self.nesterov else self.m
        self.weights = self.weights - g * F(self.lr)


def half_up(master: Tensor) -> Tensor:
    """Rounds fp32 numbers half-up to bf16, as weights are rounded."""
    bits = master.detach().numpy().view(np.uint32)
    return torch.from_numpy(((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)).view(torch.bfloat16)
