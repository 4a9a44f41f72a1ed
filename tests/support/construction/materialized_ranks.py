"""The work of ranks that train copies of a model without memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ext
from hydra_ext import Checks, errors
from support.construction.materialized import MODELS, OPTIMIZERS, Counted, in_parts, train_briefly

FAMILY = MODELS["gpt2"]
ROOMY = 2**26


def _offloaded(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> hydra_ext.offload:
    return hydra_ext.offload(model, optimizer, budget=ROOMY, checks=Checks(poison_hosts=True))


def train_together(rank: int, weights: str | None) -> tuple[list[torch.Tensor], int]:
    """Returns losses and parameters of ranks with different seeds; only the first rank has the files."""
    torch.manual_seed(3 + rank)
    build = Counted(FAMILY)
    model = hydra_ext.materialize(build, weights=weights if rank == 0 else None)
    optimizer = OPTIMIZERS["native"](list(model.parameters()))
    with pytest.MonkeyPatch.context() as patch:
        in_parts(patch, model, 3)
        with _offloaded(model, optimizer) as run:
            seen = train_briefly(model, optimizer, FAMILY)
            assert run.report().windows > 0
    return [*seen, *(parameter.detach() for parameter in model.parameters())], build.calls


def enter_without_files(rank: int, weights: str) -> tuple[str, str, bool]:
    """Gives each rank its files, and removes those of the second one."""
    own = Path(weights) / str(rank)
    model = hydra_ext.materialize(Counted(FAMILY), weights=own)
    torch.distributed.barrier()
    if rank == 1:
        for file in own.glob("*.safetensors"):
            file.unlink()
    return _refused(model)


def enter_one_with_memory(rank: int) -> tuple[str, str, bool]:
    torch.manual_seed(3)
    return _refused(FAMILY.build() if rank == 0 else hydra_ext.materialize(FAMILY.build))


def _refused(model: Any) -> tuple[str, str, bool]:
    try:
        with _offloaded(model, OPTIMIZERS["native"](list(model.parameters()))):
            return "", "", False
    except errors.HydraError as error:
        return type(error).__name__, str(error), all(parameter.is_meta for parameter in model.parameters())
