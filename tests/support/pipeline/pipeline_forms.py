"""A run whose messages change their form: short batches, and evaluations in between."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.pipeline import Pipeline
from support.pipeline import pipelines

STEPS = ((4, 4), (4, 4), (4, 1), (4, 4))  # rows of each microbatch
EVALUATED_BEFORE = 3  # the step before which the model is evaluated, with microbatches of four rows


def _stages() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(3, 5), nn.Tanh()), nn.Linear(5, 2)]


def _data(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(rows, 3, generator=generator) for rows in STEPS[step]]


def _loss(value: Tensor, _: Tensor) -> Tensor:
    return value.square().mean()


def train(rank: int) -> tuple[dict[str, int], list[list[float]], list[float]]:
    """Returns the number of forms described on each link of this rank, the losses, and those of the evaluation."""
    losses: list[list[float]] = []
    evaluated: list[float] = []
    with Pipeline(None, pipelines.sgd, schedule="1f1b", microbatches=2, stages=_stages(), seed=5) as pipe:
        for step in range(len(STEPS)):
            if step == EVALUATED_BEFORE:
                evaluated = [loss.item() for loss in pipe.evaluate(_data(0), _loss).losses]
            losses.append([loss.item() for loss in pipe.step(_data(step), _loss).losses])
        engine: Any = pipe._engine
        links = engine.assembly.stages[0].links
        losses_to = next(iter(engine.assembly.loss_listeners), None)
        ends = {"activations": links.outbox, "gradients": links.gradient_outbox, "losses": losses_to}
        return {name: end._forms.noted for name, end in ends.items() if end is not None}, losses, evaluated


def train_alone() -> tuple[list[list[float]], list[float]]:
    """The losses of a plain loop, and those of the evaluation."""
    model = nn.Sequential(*_stages())
    optimizer = pipelines.sgd(list(model.parameters()))
    losses: list[list[float]] = []
    evaluated: list[float] = []
    for step in range(len(STEPS)):
        if step == EVALUATED_BEFORE:
            with torch.no_grad():
                evaluated = [_loss(model(x), x).item() for x in _data(0)]
        found = [_loss(model(x), x) for x in _data(step)]
        for loss in found:
            (loss / len(found)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in found])
    return losses, evaluated
