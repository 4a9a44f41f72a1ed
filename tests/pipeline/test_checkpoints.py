"""A pipeline that goes on from a checkpoint has the bits of one that was never interrupted, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.pipeline_checkpoints import SAVED, check, load_and_go_on, save_and_go_on
from support.plain_models import Case
from support.ranks import run_ranks

FEW = (
    Case("llama", microbatches=3, steps=5),
    Case("resnet_dropout", microbatches=3, steps=5, optimizer="sgd"),
    Case("llama", schedule="2bw", microbatches=3, steps=5, optimizer="native-adamw", max_norm=0.5),
)
MORE = (
    Case("translator_dropout", schedule="gpipe", steps=5, optimizer="sgd"),
    Case("mixtral_router", steps=5, optimizer="native-adamw", max_norm=0.5),
    Case("mobilenet", schedule="2bw", steps=6),
    Case("vit", schedule="2bw", steps=5, optimizer="sgd", recompute=True),
)
NUMBERS = (1, 2, 3)


def ranks(body: Callable[..., Any], *arguments: Any, folder: Path, size: int) -> list[Any]:
    folder.mkdir()
    return [body(0, *arguments)] if size == 1 else run_ranks(body, *arguments, folder=folder, size=size)


def save_and_load_everywhere(cases: Sequence[Case], folder: Path) -> None:
    saved = {size: folder / f"from {size}" for size in NUMBERS}
    for size in NUMBERS:
        found = ranks(save_and_go_on, cases, saved[size], folder=folder / f"save {size}", size=size)
        for number, case in enumerate(cases):
            check(case, [results[number] for results in found], 0)
    for size in NUMBERS:
        others = [saved[other] for other in NUMBERS if other != size]
        found = ranks(load_and_go_on, cases, others, folder=folder / f"load {size}", size=size)
        for number, case in enumerate(cases):
            for other in range(len(others)):
                check(case, [results[number * len(others) + other] for results in found], SAVED)


def test_one_two_and_three_ranks_go_on_from_each_others_checkpoints(tmp_path: Path) -> None:
    save_and_load_everywhere(FEW, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("case", MORE, ids=lambda case: case.name)
def test_more_models_go_on_from_checkpoints_of_any_number_of_ranks(case: Case, tmp_path: Path) -> None:
    save_and_load_everywhere([case], tmp_path)
