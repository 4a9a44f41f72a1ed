"""An evaluation whose first stage is much faster than the second."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hydra_ext.pipeline import Pipeline
from support.pipeline import pipelines

COUNT = 12
_WIDE = 250_000  # elements: far more than a connection buffers before they are read


class Fast(nn.Module):
    """Notes the number of undelivered messages at the beginning of each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.pipe: Pipeline | None = None
        self.undelivered: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.pipe is not None:
            self.undelivered.append(self.pipe._engine.assembly.stages[0].links.outbox._waiting)
        return (x * self.scale).expand(_WIDE).contiguous()


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(20):
            x = torch.sin(x)
        return x * self.scale


def evaluate(rank: int) -> tuple[list[int], list[float]]:
    """Returns the counts of undelivered messages, and the losses."""
    stages = [Fast(), Slow()]
    with Pipeline(None, pipelines.sgd, schedule="1f1b", microbatches=2, stages=stages, seed=5) as pipe:
        stages[0].pipe = pipe
        losses = pipe.evaluate([torch.tensor(float(n)) for n in range(COUNT)], lambda value, _: value.mean()).losses
        return stages[0].undelivered, [loss.item() for loss in losses]
