"""Stages of a plain module under a budget, with microbatches of several shapes in one step, are the plain loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.plain.plain_budgets import MICROBATCHES, STEPS, Case, check, train_all
from support.plain.plain_inputs import SUBJECTS
from support.ranks import run_ranks

VIEWS = "written views"  # without a budget: a call's tensors come to the device one by one, as by Tensor.to
CALLED_TWICE = "conditioned"  # with twice the activations, which leave no such budget that weights make room
EVERY = [5, pytest.param(1, marks=pytest.mark.full)]  # of the cases that share two processes


def _check_all(cases: Sequence[Case], folder: Path) -> list[list[dict[str, Any]]]:
    ranks = run_ranks(train_all, cases, folder=folder)
    for case, *results in zip(cases, *ranks, strict=True):
        check(case, results)
    return ranks


@pytest.mark.cases(1)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_views_of_one_memory_stay_so_in_one_process(stages: int, recompute: bool) -> None:
    case = Case(VIEWS, "gpipe" if stages == 1 else "interleaved", stages=stages, recompute=recompute)
    check(case, [*train_all(0, [case])])


@pytest.mark.full
def test_views_of_one_memory_stay_so_on_two_ranks(tmp_path: Path) -> None:
    kinds = [("gpipe", 2), ("interleaved", 4)]
    cases = [
        Case(VIEWS, schedule, stages=stages, recompute=recompute)
        for schedule, stages in kinds
        for recompute in (False, True)
    ]
    _check_all(cases, tmp_path)


@pytest.mark.parametrize("every", EVERY)
def test_a_shape_may_come_up_in_the_middle_of_a_step(every: int, tmp_path: Path) -> None:
    cases = [
        Case("dict", "gpipe", 2, budget=48_000),
        Case("dict", "gpipe", 3, budget=56_000),
        Case("dict", "1f1b", 2, budget=36_000),
        Case("dict", "1f1b", 3, budget=40_000),
        Case("dict", "gpipe", 2, budget=30_000, recompute=True),
        Case("dict", "gpipe", 3, budget=36_000, recompute=True),
    ]
    for results in _check_all(cases[::every], tmp_path):
        for case, result in zip(cases[::every], results, strict=True):
            forwards = MICROBATCHES * (1 + case.recompute)
            # Once more for each kind of microbatch that the cuts were not chosen by.
            assert result["calls"] == [forwards + case.kinds - 1] + [forwards] * (STEPS - 1), case


@pytest.mark.parametrize("every", EVERY)
def test_however_inputs_are_given(every: int, tmp_path: Path) -> None:
    cases = [Case(name, budget=49_152) for name in SUBJECTS if name not in (CALLED_TWICE, VIEWS)]
    cases.append(Case(CALLED_TWICE, budget=90_000, evicts=False))
    _check_all(cases[::every], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("budget", [None, 100_000])
def test_each_of_several_stages_of_a_rank_gets_the_microbatch_as_it_was(budget: int | None, tmp_path: Path) -> None:
    names = ("written numbers", "written, the microbatch's", "left in the microbatch", "table")
    of = [(name, recompute) for name in names for recompute in (False, True)]
    cases = [
        Case(name, "interleaved", budget=budget, stages=4, recompute=recompute, evicts=False) for name, recompute in of
    ]
    _check_all(cases, tmp_path)
