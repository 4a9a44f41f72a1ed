"""Ranks that make their models from different random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hydra_ext
from hydra_ext.pipeline import Pipeline
from support.pipeline.pipelines import sgd
from support.split.split_models import VOCABULARY, Batch
from support.split.split_models_own import Layer, Stack, text, text_loss

COMMON = ("embed.weight", "scale", "shift", "code")


class Tied(Stack):
    """A model with tied weights at both ends, which reads a frozen weight, a buffer and a tensor between all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.rand(32), requires_grad=False)
        self.register_buffer("shift", torch.rand(32))
        self.code = torch.rand(32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h) * self.scale + self.shift + self.code
        out: Tensor = self.head(h)
        return out


def seeded(seed: int, *, materialized: bool = False) -> Tied:
    torch.manual_seed(seed)
    made = hydra_ext.materialize(Tied) if materialized else Tied()
    assert isinstance(made, Tied)
    return made


def data() -> list[list[Batch]]:
    generator = torch.Generator().manual_seed(1)
    return [[text(generator) for _ in range(2)] for _ in range(2)]


def train(rank: int, schedule: str, replicas: int, materialized: bool) -> dict[str, Any]:
    """Returns losses, and this rank's final values of :data:`COMMON`."""
    model = seeded(rank, materialized=materialized)
    losses = []
    with Pipeline(model, sgd, schedule=schedule, microbatches=2, replicas=replicas, cuts=["layers.2"], seed=5) as pipe:
        for batches in data():
            losses.append(torch.stack(pipe.step(batches, lambda batch: text_loss(model, batch)).losses))
        state = {name: tensor.clone() for name, tensor in pipe.state_dict().items() if name in COMMON}
    return {"losses": torch.stack(losses), "common": {**state, "code": model.code}}


def first_losses(seeds: tuple[int, int]) -> Tensor:
    """Returns the losses of a model whose first half is from one seed and whose second is from the other.

    The tensors that both halves share are from the first seed.
    """
    first, second = map(seeded, seeds)
    for number in (2, 3):
        first.layers[number] = second.layers[number]
    return torch.stack([text_loss(first, batch).detach() for batch in data()[0]])


class Ends(nn.Module):
    def __init__(self, embed: nn.Embedding, *, last: bool) -> None:
        super().__init__()
        self.embed, self.layer, self.last = embed, Layer(), last

    def forward(self, x: Any) -> Tensor:
        h: Tensor = self.layer(x if self.last else self.embed(x["x"]))
        return F.linear(h, self.embed.weight) if self.last else h


def train_explicit(rank: int, frozen: bool) -> Tensor:
    """Trains stages that are given as modules and share the embedding. Returns its weights."""
    torch.manual_seed(rank)
    embed = nn.Embedding(VOCABULARY, 32)
    embed.weight.requires_grad_(not frozen)

    def loss(out: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), batch["y"].flatten())

    stages = [Ends(embed, last=False), Ends(embed, last=True)]
    with Pipeline(None, sgd, schedule="1f1b", microbatches=2, stages=stages, seed=5) as pipe:
        for batches in data():
            pipe.step(batches, loss)
    return embed.weight.detach()
