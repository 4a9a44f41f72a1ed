"""Plain models that a pipeline of several processes must not train, or must stop training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hydra_ext.errors import HydraError
from hydra_ext.pipeline import Pipeline
from hydra_ext.split import Rehearsal
from support.pipeline.pipelines import sgd
from support.split.split_models import Batch
from support.split.split_models_own import IntoList, Stack, text, text_loss, two_losses


# ---- models that cannot be cut --------------------------------------------------------------------------------------
class Reentrant(Stack):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=True)
        out: Tensor = self.head(h)
        return out


class RunsBackward(Stack):
    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](self.embed(x))
        (slope,) = torch.autograd.grad(h.square().sum(), h, create_graph=True)
        out: Tensor = self.head(self.layers[1](h + slope))
        return out


class Chances(Stack):
    """Draws in every process which layers to leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.chance = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            if torch.rand((), generator=self.chance) > 0.5:
                h = layer(h)
        out: Tensor = self.head(h)
        return out


REFUSED = {"list": IntoList, "reentrant": Reentrant, "backward": RunsBackward, "chances": Chances}


CUTS = {2: (3,), 3: (2, 4), 4: (1, 3, 4)}  # by the number of ranks


# ---- models that change after the cut -------------------------------------------------------------------------------
class Detours(Stack):
    """Takes another path if ``way`` is set."""

    way = ""

    def forward(self, x: Tensor) -> Tensor:
        h = first = self.embed(x)
        for i, layer in enumerate(self.layers):
            h = layer(h)
            if self.way == "old value" and i == 2:
                h = h + first
            if self.way == "glue" and i == 0:
                h = h + 1
            if self.way == "order" and i == 1:
                h = self.layers[0](h)
            if i == 1:
                h = h - 0.5 if self.way == "function" else h + 0.5
        if self.way == "reads":
            h = h * float(first.detach().mean())
        if self.way == "uncalled":
            return F.linear(h, self.head.weight, self.head.bias)
        out: Tensor = self.head(h)
        return out


WAYS = ("old value", "glue", "order", "function", "reads", "uncalled")


@dataclass(frozen=True)
class Change:
    """A change that makes a training fail.

    Attributes:
        way: Value for :class:`Detours`; or "drop n", which removes the n-th crossing value from the rehearsal.
        step: Step before which the change is made. Before step -1 the cuts are not made yet.
        rank: Rank with the change; None for all.
    """

    way: str
    step: int = 0
    rank: int | None = None


@dataclass(frozen=True)
class Ended:
    """The end of a training: losses of the finished steps, and the kind and text of the error, "" without one."""

    losses: list[Tensor]
    kind: str
    text: str


def refuse_models(rank: int, names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the refusal of each model in :data:`REFUSED`."""
    ended = []
    for name in names:
        torch.manual_seed(0)
        model = REFUSED[name]()
        if isinstance(model, Chances):
            model.chance.manual_seed(rank)
        ended.append(vars(_train(model, two_losses if name == "list" else text_loss)))
    return ended


def refuse_changes(rank: int, changes: Sequence[Change]) -> list[dict[str, Any]]:
    ended = []
    for change in changes:
        torch.manual_seed(0)
        model = Detours()
        ended.append(vars(_train(model, text_loss, change if change.rank in (None, rank) else None)))
    return ended


def data(steps: int) -> list[list[Batch]]:
    generator = torch.Generator().manual_seed(1)
    return [[text(generator) for _ in range(3)] for _ in range(steps)]


def _train(model: nn.Module, fn: Any, change: Change | None = None) -> Ended:
    """Trains for three steps, the first ``change.step`` of them without the change."""
    losses: list[Tensor] = []
    batches = data(3)

    def of(batch: Batch) -> Tensor:
        loss: Tensor = fn(model, batch)
        return loss

    # Events are the embedding, four layers and the head. Cuts that the pipeline chooses would depend on measured times.
    cuts = None if change is None and not isinstance(model, Detours) else CUTS[dist.get_world_size()]
    try:
        with Pipeline(model, sgd, schedule="1f1b", microbatches=3, cuts=cuts, seed=5) as pipe:
            for step in range(-1, 3):
                if change is not None and change.step == step:
                    _apply(change, model, pipe)
                if step < 0:
                    pipe.prepare(batches[0][0], of)
                else:
                    losses.append(torch.stack(pipe.step(batches[step], of).losses))
    except HydraError as error:
        return Ended(losses, type(error).__name__, str(error))
    return Ended(losses, "", "")


def _apply(change: Change, model: nn.Module, pipe: Pipeline) -> None:
    if not change.way.startswith("drop"):
        model.way = change.way  # type: ignore[assignment]
        return
    dropped = int(change.way.split()[1])
    for part in pipe._engine.assembly.parts.own:
        known: dict[Any, dict[str, Rehearsal]] = part.program._rehearsals
        for signature, rehearsals in known.items():
            changed = [_without(rehearsal, dropped) for rehearsal in rehearsals.values()]
            known[signature] = {rehearsal.digest: rehearsal for rehearsal in changed}


def _without(rehearsal: Rehearsal, number: int) -> Rehearsal:
    """Drops value ``number`` at every boundary that has it."""
    boundaries = tuple(
        dataclasses.replace(boundary, values=boundary.values[:number] + boundary.values[number + 1 :])
        for boundary in rehearsal.boundaries
    )
    return dataclasses.replace(rehearsal, boundaries=boundaries)


def plain_losses(change: Change) -> list[Tensor]:
    """Returns the losses of the three steps in one process, with the change if it is on all ranks, else without."""
    torch.manual_seed(0)
    model = Detours()
    optimizer = sgd(model.parameters())
    losses = []
    for step, batches in enumerate(data(3)):
        if step >= change.step and change.rank is None and not change.way.startswith("drop"):
            model.way = change.way
        found = [text_loss(model, batch) for batch in batches]
        for loss in found:
            (loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(found).detach())
    return losses
