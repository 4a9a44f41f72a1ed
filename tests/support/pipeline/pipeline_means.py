"""Means over replicas in ranks, and the messages that they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hydra_ext.pipeline import Pipeline
from hydra_ext.pipeline.ranks.gradients import ordered_means

SHAPES = ((3, 5), (), (7,), (0, 4), (1, 2, 9))


def given(rank: int, dtype: torch.dtype) -> list[Tensor]:
    draws = torch.Generator().manual_seed(rank)
    return [(100 * torch.randn(shape, generator=draws)).to(dtype) for shape in SHAPES]


def means(rank: int, dtype: torch.dtype) -> list[Tensor]:
    """The means, each of which has memory of its own."""
    made = ordered_means(given(rank, dtype))
    assert len({each.untyped_storage().data_ptr() for each in made if each.numel()}) == sum(
        each.numel() > 0 for each in made
    )
    return made


def messages(_rank: int, width: int, layers: int) -> int:
    """Messages of one step's gradients, of two replicas."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    with Pipeline(model, lambda own: torch.optim.SGD(own, lr=0.1), replicas=2, stages=1, microbatches=1) as pipe:
        counted, count = _counted(dist.all_to_all_single)
        with mock.patch.object(dist, "all_to_all_single", counted):
            pipe.step(torch.ones(2, width), lambda x: model(x).square().mean())
            pipe.drain()
    return count()


def _counted(call: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[[], int]]:
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return call(*args, **kwargs)

    return counted, lambda: calls
