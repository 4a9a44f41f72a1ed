"""Pipelines that plan themselves, beside those with the same choices made by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hydra_ext
from hydra_ext.errors import HydraError
from hydra_ext.pipeline import Pipeline
from support.models.zoo import FAMILIES
from support.pipeline.pipelines import sgd

ROWS, WIDTH, STEPS = 16, 24, 3


def layers() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH)) for _ in range(5))
    )


def stateful() -> nn.Module:
    """Layers with running statistics and random numbers."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)) for _ in range(4))
    )


PLAIN = {"layers": layers, "stateful": stateful, "unbuilt": layers}


def made(name: str) -> tuple[nn.Module, list[Any], Callable[[nn.Module, Any], Any]]:
    """A model, its batches, and its loss."""
    torch.manual_seed(0)
    if name in PLAIN:
        model = hydra_ext.materialize(layers) if name == "unbuilt" else PLAIN[name]()
        batches = [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(STEPS)]
        return model, batches, lambda model, x: (model(x) - x).square().mean()
    family = FAMILIES[name]
    model = family.make(0)
    model.eval()  # no dropout: its numbers depend on the number of lines
    batches = [_together(family.batches(i, 4)) for i in range(STEPS)]
    return model, batches, family.loss


def _together(batches: list[Any]) -> Any:
    """One batch of the rows of all."""
    if isinstance(batches[0], Tensor):
        return torch.cat(batches)
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def share(batch: Any, replicas: int, replica: int) -> Any:
    if isinstance(batch, Tensor):
        return batch.chunk(replicas)[replica]
    return {key: value.chunk(replicas)[replica] for key, value in batch.items()}


def trained(name: str, by_hand: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """The results of some steps: of a plan, or of choices by hand."""
    model, batches, loss = made(name)
    planned = by_hand is None
    with Pipeline(model, sgd, seed=5, **(by_hand or {"plan": "auto"}), **options) as pipe:
        losses, calls = [], 0

        def fn(microbatch: Any) -> Any:
            nonlocal calls
            calls += 1
            return loss(model, microbatch)

        if planned:
            pipe.prepare(batches[0], fn)
        for batch in batches:
            own = batch if planned else share(batch, by_hand["replicas"], pipe.replica)
            losses.append(pipe.step(own, fn).loss)
        losses = [each.clone() for each in losses]
        weights = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        found: dict[str, Any] = {"losses": losses, "weights": weights, "calls": calls, "stages": pipe.report().stages}
        if pipe.plan is not None:
            choice = pipe.plan.choice
            found["choice"] = vars(choice)
            found["text"] = str(pipe.plan)
            found["by hand"] = {
                "schedule": choice.schedule,
                "microbatches": choice.microbatches,
                "stages": choice.stages,
                "replicas": choice.width,
                "recompute": choice.recompute,
                "cuts": list(pipe.plan.cuts),
            }
    return found


def both(rank: int, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """A plan, and the same choices by hand."""
    planned = trained(name, **options)
    common = {key: value for key, value in options.items() if key not in planned["by hand"]}
    hand = trained(name, planned["by hand"], **common)
    same = all(torch.equal(a, b) for a, b in zip(planned["losses"], hand["losses"], strict=True))
    same &= planned["weights"].keys() == hand["weights"].keys()
    same &= all(torch.equal(tensor, hand["weights"][name]) for name, tensor in planned["weights"].items())
    return {"same": same, "choice": planned["choice"], "text": planned["text"], "calls": planned["calls"]}


def refused(rank: int, options: dict[str, Any]) -> tuple[str, str]:
    """The error of a plan that cannot be made."""
    try:
        trained("layers", **options)
    except HydraError as error:
        dist.barrier()
        return type(error).__name__, str(error)
    return "", ""
