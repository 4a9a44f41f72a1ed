"""A pipeline that goes on from a checkpoint has the bits of one that was never interrupted, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.pipeline.pipeline_checkpoints import SAVED, check, load_and_go_on, save_and_go_on
from support.plain.plain_models import Case
from support.ranks import run_ranks

FEW = (Case("llama", schedule="2bw", microbatches=3, steps=5, optimizer="native-adamw", max_norm=0.5),)
MORE = (
    Case("llama", microbatches=3, steps=5),
    Case("resnet_dropout", microbatches=3, steps=5, optimizer="sgd"),
    Case("translator_dropout", schedule="gpipe", steps=5, optimizer="sgd"),
    Case("mixtral_router", steps=5, optimizer="native-adamw", max_norm=0.5),
    Case("mobilenet", schedule="2bw", steps=6),
    Case("vit", schedule="2bw", steps=5, optimizer="sgd", recompute=True),
)
NUMBERS = (1, 2, 3)


def ranks(body: Callable[..., Any], *arguments: Any, folder: Path, size: int) -> list[Any]:
    folder.mkdir()
    return [body(0, *arguments)] if size == 1 else run_ranks(body, *arguments, folder=folder, size=size)


def save_and_load(cases: Sequence[Case], sources: dict[int, list[int]], folder: Path) -> None:
    """``sources``: by the number of ranks that load, those that have saved."""
    saved = {size: folder / f"from {size}" for size in NUMBERS}
    for size in NUMBERS:
        found = ranks(save_and_go_on, cases, saved[size], folder=folder / f"save {size}", size=size)
        for number, case in enumerate(cases):
            check(case, [results[number] for results in found], 0)
    for size, others in sources.items():
        folders = [saved[other] for other in others]
        found = ranks(load_and_go_on, cases, folders, folder=folder / f"load {size}", size=size)
        for number, case in enumerate(cases):
            for other in range(len(others)):
                check(case, [results[number * len(others) + other] for results in found], SAVED)


def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    save_and_load(FEW, {2: [1], 3: [2], 1: [3]}, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("case", FEW + MORE, ids=lambda case: f"{case.name}-{case.schedule}")
def test_every_number_of_ranks_goes_on_from_every_other(case: Case, tmp_path: Path) -> None:
    save_and_load([case], {1: [1, 2, 3], 2: [1, 2, 3], 3: [1, 2, 3]}, tmp_path)
