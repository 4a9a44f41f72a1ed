"""Models that hold their weights twice: in their modules, and in lists beside them."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from hydra_ext.errors import StateError
from hydra_ext.pipeline import Pipeline
from support.pipeline.pipelines import sgd
from support.split.split_models import Batch
from support.split.split_models_own import Stack, text, text_loss


class Listed(Stack):
    """Reads two weights again at the end, through its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.keep()

    def keep(self) -> None:
        pass

    def weights(self) -> Sequence[Tensor]:
        return [layer.up.weight for layer in self.layers]  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        up = self.weights()
        out: Tensor = self.head(h + F.linear(F.gelu(F.linear(h, up[3])), up[2].t()))
        return out


class ByList(Listed):
    def keep(self) -> None:
        self.up = [layer.up.weight for layer in self.layers]  # type: ignore[union-attr]

    def weights(self) -> Sequence[Tensor]:
        return self.up  # type: ignore[return-value]


class ByDict(Listed):
    def keep(self) -> None:
        self.up = dict(enumerate(layer.up.weight for layer in self.layers))  # type: ignore[union-attr]

    def weights(self) -> Sequence[Tensor]:
        return self.up  # type: ignore[return-value]


class Deep:
    def __init__(self, held: Any) -> None:
        self.held = held


class ByObject(Listed):
    """Has its weights in a list of an object, which is in a dict in a list."""

    def keep(self) -> None:
        self.up = [{"deep": Deep([layer.up.weight for layer in self.layers])}]  # type: ignore[union-attr]

    def weights(self) -> Sequence[Tensor]:
        return self.up[0]["deep"].held  # type: ignore[no-any-return]


class ByModule(Listed):
    """Has its weights in modules that are not registered."""

    def keep(self) -> None:
        others = [nn.Linear(32, 48) for _ in self.layers]
        for other, layer in zip(others, self.layers, strict=True):
            other.weight = layer.up.weight  # type: ignore[assignment,union-attr]
        self.up = (others,)

    def weights(self) -> Sequence[Tensor]:
        return [other.weight for other in self.up[0]]


class ByTuple(Listed):
    def keep(self) -> None:
        self.up = tuple(layer.up.weight for layer in self.layers)  # type: ignore[union-attr]

    def weights(self) -> Sequence[Tensor]:
        return self.up  # type: ignore[return-value]


LISTED: dict[str, type[Listed]] = {
    "modules": Listed,
    "list": ByList,
    "dict": ByDict,
    "object": ByObject,
    "unregistered": ByModule,
    "tuple": ByTuple,
}


def data() -> list[list[Batch]]:
    generator = torch.Generator().manual_seed(1)
    return [[text(generator) for _ in range(2)] for _ in range(4)]


def train_all(rank: int, cases: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Trains each model with its schedule.

    Returns:
        The losses, the parameters of other ranks whose memory is still alive, and the modules that return their
        state_dict.
    """
    results = []
    for name, schedule in cases:
        torch.manual_seed(0)
        model = LISTED[name]()
        losses = []
        memory = {n: StorageWeakRef(p.untyped_storage()) for n, p in model.named_parameters()}
        with Pipeline(model, sgd, schedule=schedule, microbatches=2, cuts=["layers.2"], seed=5) as pipe:
            for batches in data():
                losses.append(torch.stack(pipe.step(batches, lambda b: text_loss(model, b)).losses))  # noqa: B023
            held = {n for part in pipe._engine.assembly.parts.own for n, _ in part.parameters}
            pipe.drain()
            gc.collect()  # frees modules in reference cycles, which otherwise live until some later collection
            undead = [n for n, reference in memory.items() if n not in held and not reference.expired()]
        states = [n for n, module in model.named_modules() if gives_state(module)]
        results.append({"losses": torch.stack(losses), "undead": undead, "states": states})
    return results


def gives_state(module: nn.Module) -> bool:
    try:
        module.state_dict()
    except StateError:
        return False
    return True
