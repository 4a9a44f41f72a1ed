"""What a model remembers from one microbatch to the next is right with several stages on a rank, and where a forward
runs a second time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.ranks import run_ranks
from support.stateful_models import MODELS, Case, train_all, train_plainly


def check(case: Case, ranks: list[dict[str, Any]]) -> None:
    expected = train_plainly(case)
    for rank, found in enumerate(ranks):
        assert torch.equal(found["losses"], expected["losses"]), f"{case}, rank {rank}: {found['losses']}"
    for name, value in expected["shown"].items():
        block = name.rpartition(".")[0]
        here = [found["shown"][name] for found in ranks if block in found["blocks"]]
        # What belongs to no block, each rank knows as far as it comes: one of them is there.
        shown = here or [found["shown"][name] for found in ranks]
        assert any(same(each, value) for each in shown), f"{case}: {name} is {shown}, expected {value}"
        saved = [found["buffers"][name[1:]] for found in ranks if name[1:] in found["buffers"]]
        assert not saved or any(same(each, value) for each in saved), f"{case}: {name} is {saved}, expected {value}"


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.full)])
def test_stages_of_one_rank_do_not_see_what_the_others_leave_on_modules(recompute: bool, tmp_path: Path) -> None:
    cases = [Case(name, 4, "interleaved", recompute, changed) for name in MODELS for changed in (False, True)]
    ranks = run_ranks(train_all, cases, folder=tmp_path)
    for number, case in enumerate(cases):
        check(case, [results[number] for results in ranks])


def test_a_second_forward_starts_from_the_same_memory(tmp_path: Path) -> None:
    cases = [Case(name, 2, recompute=True) for name in MODELS]
    ranks = run_ranks(train_all, cases, folder=tmp_path)
    for number, case in enumerate(cases):
        check(case, [results[number] for results in ranks])
