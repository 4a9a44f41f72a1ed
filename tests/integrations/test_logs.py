"""Figures of steps in the loggers of other libraries."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger

import hydra_ext
from hydra_ext.errors import InvalidArgument
from hydra_ext.integrations.logs import log_to
from support.windows.window_subjects import language_loss, tiny_gpt2

STEPS = 3


def trained(logger: Any) -> list[hydra_ext.StepFigures]:
    model, seen = tiny_gpt2(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hydra_ext.offload(model, optimizer, budget="2MiB") as run:
        run.on_step(log_to(logger))
        run.on_step(seen.append)
        for step in range(STEPS):
            language_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen


def test_a_function_gets_the_numbers_of_each_step() -> None:
    logged: list[tuple[dict[str, float], int]] = []
    seen = trained(lambda numbers, step: logged.append((numbers, step)))
    assert [step for _, step in logged] == [figures.step for figures in seen]
    assert [numbers["hydra/peak_bytes"] for numbers, _ in logged] == [figures.peak_bytes for figures in seen]


def test_fabric_writes_them_to_its_loggers(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, loggers=CSVLogger(tmp_path, flush_logs_every_n_steps=1))
    seen = trained(fabric.log_dict)
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        rows = [*csv.DictReader(file)]
    assert [float(row["hydra/seconds"]) for row in rows] == [figures.seconds for figures in seen]


def test_a_summary_writer_gets_each_number_by_itself() -> None:
    class Writer:
        """In the place of TensorBoard's, which has a dozen of dependencies."""

        def __init__(self) -> None:
            self.scalars: list[tuple[str, float, int]] = []

        def add_scalar(self, name: str, number: float, step: int) -> None:
            self.scalars.append((name, number, step))

    writer = Writer()
    seen = trained(writer)
    assert ("hydra/peak_bytes", seen[-1].peak_bytes, seen[-1].step) in writer.scalars
    assert len({name for name, _, _ in writer.scalars}) * STEPS == len(writer.scalars)


def test_what_is_no_logger_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"given a str: give a function such as wandb.log"):
        log_to("tensorboard")
