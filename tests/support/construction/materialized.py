"""Models of materialize(), with their data and their plain twins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import hydra_ext
from hydra_ext import _C, Run
from hydra_ext.construction import recipes
from hydra_ext.runtime.placement import moving_in
from support.benches import parameter_bytes, tight_budget
from support.models.zoo import FAMILIES, Family
from support.models.zoo_more import MORE_FAMILIES
from support.training import Recipe, train

SEED = 3
STEPS = 3
PLAIN = Recipe()


MODELS: dict[str, Family] = {
    name: {**FAMILIES, **MORE_FAMILIES}[name] for name in ("gpt2", "llama", "tied_llama", "resnet", "normed")
}

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "torch": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "native": lambda parameters: hydra_ext.optim.AdamW(parameters, lr=1e-3),
}


class Counted:
    """A constructor that counts its calls."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.calls = 0

    def __call__(self) -> nn.Module:
        self.calls += 1
        return self.family.build().train()


def write_weights(model: Any, folder: Path) -> Path:
    """Writes weights to several files, as libraries do."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder, max_shard_size="60KB")
    else:
        folder.mkdir(exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")
    return folder


def materialized(build: Callable[[], nn.Module], weights: Path | None = None) -> nn.Module:
    """Materializes a model in the random state of :meth:`Family.make`."""
    torch.manual_seed(SEED)
    return hydra_ext.materialize(build, weights=weights)


def budget_for(model: nn.Module, family: Family) -> int:
    """Returns a budget for two fifths of the blocks, so that blocks have to move."""
    return tight_budget(model, lambda each, _: family.loss(each, family.batches(1)[0]))


def train_briefly(model: nn.Module, optimizer: torch.optim.Optimizer, family: Family) -> list[Tensor]:
    return train(model, optimizer, family, PLAIN, steps=STEPS)


def arena_bytes(run: Run) -> int:
    """Returns the bytes of homes: each tensor begins at an aligned offset, and each block takes whole system pages."""
    return sum(
        _whole(sum(_whole(parameter.nbytes, _C.PAGE_ALIGNMENT) for _, parameter in block.parameters), 4096)
        for block in run.layout.blocks
    )


def _whole(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class Watched:
    """Records the bytes that had not moved yet when each block moved.

    Attributes:
        waiting: Bytes at each block, including that block.
    """

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting: list[int] = []
        self._model = model
        self._moved = 0
        self._add = moving_in._add
        monkeypatch.setattr(moving_in, "_add", self._note)

    def _note(self, core: Any, block: Any) -> None:
        there = sum(parameter.nbytes for parameter in self._model.parameters() if not parameter.is_meta)
        self.waiting.append(there - self._moved)
        self._add(core, block)
        self._moved += block.nbytes


def in_parts(monkeypatch: pytest.MonkeyPatch, model: nn.Module, parts: int) -> int:
    """Makes groups so small that the model has about ``parts`` of them. Returns their bytes."""
    size = parameter_bytes(model) // parts
    monkeypatch.setattr(recipes, "GROUP_BYTES", size)
    return size
