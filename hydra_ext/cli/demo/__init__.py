"""`demo`: trains a transformer beyond a device budget, next to plain PyTorch, and compares every number."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hydra_ext import _C
from hydra_ext.cli.demo.picture import draw
from hydra_ext.integrations import byte_text
from hydra_ext.offload import offload
from hydra_ext.policy import Compress, Keep, Offload, parse_bytes

_ACTIVATIONS: dict[str | None, Any] = {None: "auto", "keep": Keep(), "offload": Offload(), "compress": Compress()}
_LENGTH = 64
_ROWS = 2


@dataclass(frozen=True)
class Row:
    """One step of both runs."""

    step: int
    plain_loss: float
    offloaded_loss: float
    equal: bool
    peak_bytes: int
    moved_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=20, help="training steps (20)")
    parser.add_argument("--budget", default="80MiB", help="device budget (80MiB)")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model (8)")
    parser.add_argument("--width", type=int, default=512, help="width of the model (512)")
    parser.add_argument(
        "--activations",
        choices=[name for name in _ACTIVATIONS if name],
        help="policy for saved tensors, otherwise planned; with 'compress' the numbers are near the plain ones",
    )
    parser.add_argument("--picture", type=Path, default=Path("memory.png"), help="file of the memory picture")


def run(options: argparse.Namespace) -> int:
    missing = [name for name in (*byte_text.REQUIRES, "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"The demo needs {' and '.join(missing)}: pip install {' '.join(missing)}")
        return 1
    torch.set_num_threads(1)
    plain = byte_text.model(layers=options.layers, width=options.width, length=_LENGTH)
    offloaded = copy.deepcopy(plain)
    weights = sum(parameter.nbytes for parameter in plain.parameters())
    human = _C.human_bytes
    print(
        f"{byte_text.NAME} with {human(weights)} of weights, trained on Python's help text, once in plain PyTorch and"
    )
    print(f"once on a device that may hold {human(parse_bytes(options.budget))} of weights, gradients, activations.\n")
    started = time.perf_counter()
    try:
        equal = _train_both(plain, offloaded, options)
    except torch.OutOfMemoryError as error:
        print(f"hydra-ext demo: {error}", file=sys.stderr)
        return 1
    same_weights = all(torch.equal(a, b) for a, b in zip(plain.parameters(), offloaded.parameters(), strict=True))
    print(f"\nAll losses equal, bit for bit: {equal}. All weights equal after training: {same_weights}.")
    print(f"{time.perf_counter() - started:.1f} s; the memory picture is in {options.picture.resolve()}")
    return 0 if (equal and same_weights) or options.activations == "compress" else 1


def _train_both(plain: nn.Module, offloaded: nn.Module, options: argparse.Namespace) -> bool:
    text = byte_text.batches(count=options.steps, rows=_ROWS, length=_LENGTH)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    optimizer = torch.optim.AdamW(offloaded.parameters(), lr=1e-3)
    equal = True
    print("step  plain loss  offloaded loss  equal  peak device bytes / budget      bytes moved")
    activations = _ACTIVATIONS[options.activations]
    with offload(offloaded, optimizer, budget=options.budget, activations=activations) as context:
        moved = 0
        for step, ids in enumerate(text):
            if step == options.steps - 1:
                context.core.arrivals.timeline.record(10_000)
            torch.manual_seed(step)
            plain_loss = _step(plain, reference, ids)
            torch.manual_seed(step)
            loss = _step(offloaded, optimizer, ids)
            report = context.report()
            total = report.weights_moved_bytes + report.gradients_moved_bytes
            row = Row(
                step, float(plain_loss), float(loss), torch.equal(plain_loss, loss), report.peak_bytes, total - moved
            )
            moved = total
            equal = equal and row.equal
            print(_line(row, context.budget))
        print(f"\n{context.report()}")
        draw(context, options.picture)
    return equal


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> torch.Tensor:
    loss = byte_text.loss_of(model, ids)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return torch.as_tensor(loss.detach())


def _line(row: Row, budget: int) -> str:
    equal = "yes" if row.equal else "NO"
    return (
        f"{row.step:>4}  {row.plain_loss:>10.6f}  {row.offloaded_loss:>14.6f}  {equal:<5}  "
        f"{row.peak_bytes:>12,} / {budget:>12,}  {row.moved_bytes:>14,}"
    )
