"""Microbatches whose tensors are filled again before the pipeline has repeated its forward on them."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.errors import RankFailed, StateError
from hydra_ext.pipeline import Pipeline
from support.pipeline import pipelines

COUNT = 4
KINDS = ("one set of tensors", "views of one tensor", "objects", "objects in objects")


class Enters(nn.Module):
    """Writes to its input, as a normalisation in place does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(pipelines.WIDTH, pipelines.WIDTH)

    def forward(self, microbatch: Any) -> Tensor:
        x = microbatch["x"] if microbatch["x"].requires_grad else microbatch["x"].mul_(0.5).add_(1)
        return torch.tanh(self.linear(x))


def loss_of(output: Tensor, microbatch: Any) -> Tensor:
    microbatch["labels"][microbatch["labels"] == 1] = 0
    return pipelines.loss_of(output, {"labels": microbatch.pop("labels")})


class Outer:
    """A microbatch whose tensors are in an object that it holds."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.inner = SimpleNamespace(tensors=dict(tensors))

    def __getitem__(self, name: str) -> Tensor:
        return self.inner.tensors[name]

    def pop(self, name: str) -> Tensor:
        return self.inner.tensors.pop(name)


_MADE: dict[str, Any] = {"objects": UserDict, "objects in objects": Outer}


def _buffers(kind: str) -> list[dict[str, Tensor]]:
    if kind == "views of one tensor":
        xs, labels = torch.empty(2 * COUNT, 3, pipelines.WIDTH), torch.empty(2 * COUNT, 3, dtype=torch.long)
        return [{"x": x, "labels": y} for x, y in zip(xs.split(2), labels.split(2), strict=True)]
    return [
        {"x": torch.empty(2, 3, pipelines.WIDTH), "labels": torch.empty(2, 3, dtype=torch.long)} for _ in range(COUNT)
    ]


def _train(rank: int, kind: str, *, reuse: bool, recompute: bool) -> list[Tensor]:
    torch.manual_seed(1)
    stages = [Enters(), *pipelines.make_stages(2)[1:]]
    buffers = _buffers(kind)
    with Pipeline(None, pipelines.sgd, stages=stages, microbatches=COUNT, seed=5, recompute=recompute) as pipe:
        for step in range(6):
            generator = torch.Generator().manual_seed(step)
            buffers = buffers if reuse else _buffers(kind)
            for each in buffers:
                each["x"].copy_(torch.randn(each["x"].shape, generator=generator))
                each["labels"].copy_(torch.randint(pipelines.CLASSES, each["labels"].shape, generator=generator))
            pipe.step([_MADE.get(kind, dict)(each) for each in buffers], loss_of)
    return [parameter.detach() for parameter in stages[rank].parameters()]


def weights(rank: int) -> dict[str, list[Tensor]]:
    """Returns the weights without recomputation, and with it: with new tensors in each step, and with reused ones."""
    found = {"": _train(rank, "", reuse=False, recompute=False)}
    for kind in KINDS:
        found[kind] = _train(rank, kind, reuse=False, recompute=True)
        found[f"{kind}, reused"] = _train(rank, kind, reuse=True, recompute=True)
    return found


def gradients(rank: int, write: bool) -> tuple[list[bool], str]:
    """Returns which of the microbatches' tensors have got the gradient that they require, and the error."""
    stages = [Enters(), *pipelines.make_stages(2)[1:]]
    data = [{key: value.clone() for key, value in each.items()} for each in _buffers("")]
    for each in data:
        each["x"].zero_().requires_grad_()
        each["labels"].zero_()
    pipe = Pipeline(None, pipelines.sgd, stages=stages, microbatches=COUNT, seed=5, recompute=True)
    error = ""
    try:
        pipe.step([dict(each) for each in data], loss_of)
        if write:
            with torch.no_grad():
                data[-1]["x"].add_(1)
        pipe.drain()
        pipe.close()
    except (StateError, RankFailed) as raised:  # from both ranks, in close() at the latest
        error = str(raised)
    return [each["x"].grad is not None for each in data], error
