"""What a model remembers from one microbatch to the next is right with several stages on a rank, and where a forward
runs a second time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.ranks import run_ranks
from support.split.stateful_models import CHECKPOINTED, MODELS, Case, told_and_trained, train_all, train_plainly


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


@pytest.mark.full
@pytest.mark.parametrize("recompute", [False, True])
def test_stages_of_one_rank_do_not_see_what_the_others_leave_on_modules(recompute: bool, tmp_path: Path) -> None:
    cases = [
        Case(name, 4, "interleaved", recompute, changed)
        for number, name in enumerate(MODELS)
        for changed in (False, True)
        if recompute or changed == number % 2
    ]
    ranks = run_ranks(train_all, cases, folder=tmp_path)
    for number, case in enumerate(cases):
        check(case, [results[number] for results in ranks])


def test_a_second_forward_starts_from_the_same_memory(tmp_path: Path) -> None:
    cases = [Case(name, 2, recompute=True) for name in MODELS]
    ranks = run_ranks(train_all, cases, folder=tmp_path)
    for number, case in enumerate(cases):
        check(case, [results[number] for results in ranks])


READING = [name for name in CHECKPOINTED if name.endswith("reads")]


@pytest.mark.full
@pytest.mark.parametrize("stages", [2, 4])
def test_a_checkpoint_of_the_models_own_reads_what_its_forward_left(stages: int, tmp_path: Path) -> None:
    """Two stages, and more so four on two ranks, forward the second microbatch before the first goes backward."""
    schedule = "1f1b" if stages == 2 else "interleaved"
    cases = [Case(name, stages, schedule, recompute, changed=True) for name in READING for recompute in (False, True)]
    cases.append(Case("checkpoint at the end writes", stages, schedule))
    ranks = run_ranks(train_all, cases, folder=tmp_path)
    for number, case in enumerate(cases):
        check(case, [results[number] for results in ranks])


def test_statistics_that_a_checkpoint_writes_again_are_those_of_the_forwards_and_that_is_told(tmp_path: Path) -> None:
    """In the first stage, where a later microbatch has been there; in the last one they are as in a loop."""
    case = Case("checkpoints write statistics", 2)
    first, last = run_ranks(told_and_trained, case, folder=tmp_path)
    once, twice = train_plainly(replace(case, model="statistics without checkpoints")), train_plainly(case)
    for found in (first, last):
        assert torch.equal(found["losses"], twice["losses"])
    for number, found, expected in ((0, first, once), (1, first, once), (2, last, twice), (3, last, twice)):
        name = f"layers.{number}.statistics.running_var"
        assert torch.equal(found["shown"][name], expected["shown"][name]), name
    assert not torch.equal(once["shown"][name], twice["shown"][name])
    assert [text.count("BatchNorm1d.num_batches_tracked") for text in first["told"]] == [1]
    assert last["told"] == []
