"""Pipelines whose reports and traces tests examine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.pipeline import Pipeline
from support.pipeline import pipelines
from support.pipeline.pipelines import CLASSES, WIDTH, Case, Layer

PARAMETER_BYTES = 4


class Tied(nn.Module):
    """A plain module whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def figures(rank: int, case: Case) -> dict[str, Any]:
    """Returns the report and its text after the last step and after the end, and the rank's seconds."""
    start = time.perf_counter()
    pipe = make(case)
    for step in range(case.steps):
        pipe.step(pipelines.data_of(case, step, pipe.replica), pipelines.loss_of, max_norm=case.max_norm)
    steps, text = pipe.report().as_dict(), str(pipe.report())
    pipe.close()
    return {"steps": steps, "end": pipe.report().as_dict(), "text": text, "seconds": time.perf_counter() - start}


def make(case: Case) -> Pipeline:
    return Pipeline(
        None,
        pipelines.OPTIMIZERS[case.optimizer],
        stages=pipelines.make_stages(case.stages),
        schedule=case.schedule,
        microbatches=case.microbatches,
        replicas=case.replicas,
        seed=5,
    )


def all_figures(rank: int, cases: Sequence[Case]) -> list[dict[str, Any]]:
    return [figures(rank, case) for case in cases]


def figures_of_plain_module(rank: int, schedule: str) -> dict[str, Any]:
    model = Tied()

    def loss(microbatch: dict[str, Tensor]) -> Tensor:
        return pipelines.loss_of(model(microbatch["ids"]), microbatch)

    with Pipeline(model, pipelines.adamw, schedule=schedule, microbatches=2, cuts=["layers.2"], seed=5) as pipe:
        before = pipe.report()
        for step in range(3):
            pipe.step([pipelines.make_microbatch(step, index) for index in range(2)], loss)
    return {"before": before.as_dict(), "before_text": str(before), **pipe.report().as_dict()}


def skipped_updates(rank: int) -> dict[str, Any]:
    """Trains on four batches, of which the second has an infinite loss."""
    case = Case(steps=4)

    def loss(output: Tensor, microbatch: dict[str, Tensor]) -> Tensor:
        return pipelines.loss_of(output, microbatch) * microbatch["factor"]

    with make(case) as pipe:
        for step in range(case.steps):
            factor = torch.tensor(float("inf") if step == 1 else 1.0)
            data = [{**microbatch, "factor": factor} for microbatch in pipelines.data_of(case, step)]
            pipe.step(data, loss, max_norm=1.0)
    return pipe.report().as_dict()
