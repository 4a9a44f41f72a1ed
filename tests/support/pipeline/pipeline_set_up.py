"""A rank that fails during the set-up of a pipeline, and the reactions of the others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hydra_ext.errors import HydraError
from hydra_ext.pipeline import Pipeline
from hydra_ext.pipeline.ranks.groups import Groups
from support.pipeline import pipelines
from support.pipeline.pipeline_failures import fail, leave_record

FAILING = 1  # the second of two ranks


@dataclass(frozen=True)
class FailingSetUp:
    """A failure and its place.

    Attributes:
        how: "kill" or "raise".
        where: "optimizer" or "builder", the user's functions for a stage; "rehearsal", the user's ``fn``; "connecting",
            when some process groups have been made and others have not; "copying", when replicas get the first one's
            weights.
    """

    how: str
    where: str
    patience: float


def set_up(rank: int, failing: FailingSetUp, folder: Path) -> None:
    """Sets up a pipeline, and writes the rank's error and its time. The failed process stays, as in a notebook."""

    def trap(where: str) -> None:
        if rank == FAILING and failing.where == where:
            fail(failing.how, folder)

    if rank == FAILING:
        dist.new_group = _at_second_call(dist.new_group, lambda: trap("connecting"))
        Groups.broadcast = _at_second_call(Groups.broadcast, lambda: trap("copying"))  # type: ignore[method-assign]
    leave_record(rank, folder, lambda record: _begin(failing, trap, record))
    if rank == FAILING:
        signal.pause()
    os._exit(0)


def _at_second_call(function: Callable[..., Any], trap: Callable[[], None]) -> Callable[..., Any]:
    calls = []

    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            trap()
        return function(*arguments, **options)

    return call


def _begin(failing: FailingSetUp, trap: Callable[[str], None], record: dict[str, Any]) -> None:
    def optimizer(parameters: Any) -> Any:
        trap("optimizer")
        return pipelines.sgd(parameters)

    def build(stage: int) -> nn.Module:
        trap("builder")
        built.append(pipelines.make_stages(count)[stage])
        return built[-1]

    def fn(microbatch: Any) -> Any:
        trap("rehearsal")
        return pipelines.loss_of(model(microbatch), microbatch)

    built: list[nn.Module] = []
    count = 1 if failing.where == "copying" else 2
    options: dict[str, Any] = {"microbatches": 4, "seed": 5, "patience": failing.patience, "replicas": 3 - count}
    if failing.where == "rehearsal":
        model = nn.Sequential(*pipelines.make_stages(2))
        Pipeline(model, optimizer, **options).prepare(pipelines.make_microbatch(0, 0), fn)
        return
    if failing.where == "optimizer":
        options["budget"] = "1 MiB"  # the other rank already has a device then
    try:
        Pipeline(None, optimizer, stages=[lambda stage=stage: build(stage) for stage in range(count)], **options)
    finally:
        record["as built"] = [type(module) is nn.Sequential for module in built]


class Masked(nn.Module):
    """Has a buffer whose rows share memory."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mask", torch.full((1, 8), value).expand(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.mask


def replicas_with_expanded_buffers(rank: int) -> list[str]:
    """Returns the loss of two replicas with equal buffers, and the error of two with different ones."""
    told = []
    for value in (0.5, 0.5 + rank):
        try:
            with Pipeline(
                None, pipelines.sgd, stages=[Masked(value)], microbatches=1, replicas=2, patience=4.0
            ) as pipe:
                told.append(str(pipe.step([torch.ones(3, 8)], lambda value, _: value.square().mean()).loss.item()))
        except HydraError as error:
            told.append(f"{type(error).__name__}: {error}")
    return told
