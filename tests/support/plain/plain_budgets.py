"""Plain models cut into two stages, on the host under a budget, with microbatches of several shapes in a step.

The reference is a plain loop over the same microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from hydra_ext import Checks
from hydra_ext.pipeline import Pipeline
from support.plain.plain_inputs import CLASSES, LAYERS, ROWS, SUBJECTS, WIDTH

STEPS = 3
MICROBATCHES = 4
SHAPES = (3, 2, ROWS)  # rows of microbatches, in turn


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        kinds: The number of shapes of a step's microbatches.
        stages: The number of stages on two ranks.
        evicts: Whether the budget is so small that weights are evicted.
    """

    subject: str
    schedule: str = "gpipe"
    kinds: int = 2
    budget: int | None = None
    stages: int = 2
    recompute: bool = False
    evicts: bool = True


def data_of(case: Case, step: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    rows = islice(cycle(SHAPES[: case.kinds]), step, step + MICROBATCHES)  # each step begins with another shape
    views = case.subject == "written views"

    def inputs(n: int) -> tuple[Tensor, Tensor]:
        if not views:
            return torch.randn(n, WIDTH, generator=generator), torch.randn(n, WIDTH, generator=generator)
        both = torch.randn(n, WIDTH + 1, generator=generator)
        return both[:, :-1], both[:, 1:]

    return [
        {
            **dict(zip(("x", "other"), inputs(n), strict=True)),
            "late": torch.randn(1, generator=generator),
            "ids": torch.randint(WIDTH, (n,), generator=generator),
            "positions": torch.randperm(n, generator=generator),
            "labels": torch.randint(CLASSES, (n,), generator=generator),
        }
        for n in rows
    ]


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _train(case: Case) -> dict[str, Any]:
    subject = SUBJECTS[case.subject]
    model = subject.make()
    names = {parameter: name for name, parameter in model.named_parameters()}
    count = 0

    def fn(microbatch: Any) -> Tensor:
        nonlocal count
        count += 1
        return subject.fn(model, microbatch)

    losses, calls = [], []
    with Pipeline(
        model,
        make_optimizer,
        stages=case.stages,
        cuts=[f"layers.{stage * LAYERS // case.stages}" for stage in range(1, case.stages)],
        recompute=case.recompute,
        schedule=case.schedule,
        microbatches=MICROBATCHES,
        budget=case.budget,
        checks=None if case.budget is None else Checks(poison_hosts=True),
        seed=5,
    ) as pipe:
        pipe.prepare(data_of(case, 0)[0], fn)
        for step in range(STEPS):
            before = count
            losses.append(torch.stack(list(pipe.step(data_of(case, step), fn).losses)))
            calls.append(count - before)
        device = pipe.report().device
    own = {names[p]: p.detach().clone() for group in pipe.optimizers for g in group.param_groups for p in g["params"]}
    return {"losses": losses, "weights": own, "calls": calls, "device": device and device.as_dict()}


def train_all(_rank: int, cases: Sequence[Case]) -> list[dict[str, Any]]:
    results = []
    for case in cases:
        try:
            results.append(_train(case))
        except Exception as error:
            raise RuntimeError(f"{case}: {type(error).__name__}") from error
    return results


def check(case: Case, ranks: Sequence[dict[str, Any]]) -> None:
    losses, weights = _plain(case)
    assert {name for result in ranks for name in result["weights"]} == set(weights)
    for rank, result in enumerate(ranks):
        where = f"{case}, rank {rank}"
        for step, (found, expected) in enumerate(zip(result["losses"], losses, strict=True)):
            assert torch.equal(found, expected), f"{where}: losses of step {step}: {found} and {expected}"
        for name, weight in result["weights"].items():
            assert torch.equal(weight, weights[name]), f"{where}: {name}"
        if case.budget is not None:
            device = result["device"]
            assert device["windows"] > 0, where
            assert device["faults"] == 0, where
            assert device["loads"] > 0, where
            assert device["evictions"] > 0 or not case.evicts, where
            assert device["peak_bytes"] <= case.budget, where


def _plain(case: Case) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Trains in a loop in one process."""
    subject = SUBJECTS[case.subject]
    model = subject.make()
    optimizer = make_optimizer(model.parameters())
    losses = []
    for step in range(STEPS):
        of_step = []
        for microbatch in data_of(case, step):
            loss = subject.fn(model, microbatch)
            (loss / MICROBATCHES).backward()
            of_step.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(of_step))
    return losses, dict(model.named_parameters())
