"""Shared helpers of tests of hydra_ext.optim: parameters, one update with given gradients, comparison by bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hydra_ext.optim.host_optimizer import HostOptimizer
from hydra_ext.optim.threads import pool

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.int16: torch.int16}


def parameter(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(shape, generator=generator).to(dtype))


def gradient_like(weights: Tensor, seed: int, dtype: torch.dtype | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(weights.shape, generator=generator).to(dtype or weights.dtype)


def update(optimizer: HostOptimizer, gradients: Sequence[tuple[Tensor, Tensor]], scale: float = 1.0) -> None:
    """Makes a step with gradients of any type, also types that ``.grad`` does not accept."""
    (prepared,) = optimizer.prepare([gradients])
    prepared.plan.run(pool(1), scale)
    optimizer.finish(prepared)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.detach().view(BITS[a.dtype]), b.detach().view(BITS[b.dtype]))
