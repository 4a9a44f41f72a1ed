"""A pipeline of several processes has, to the last bit, the losses and weights of a recurrence in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.pipeline import pipelines
from support.pipeline.pipelines import OPTIMIZERS, Case
from support.ranks import run_ranks


def full(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.full)


# Of the cases of one test; the first and the last of four differ in everything.
EVERY = [3, full(1)]


def check(cases: Sequence[Case], folder: Path, *, delay: int | Sequence[int], size: int | None = None) -> None:
    size = size or cases[0].stages * cases[0].replicas
    ranks = run_ranks(pipelines.train_all, cases, folder=folder, size=size)
    for index, case in enumerate(cases):
        pipelines.same([results[index] for results in ranks], pipelines.recurrence(case, delay), case, delay)


@pytest.mark.cases(1)
@pytest.mark.parametrize("stages", [full(1), 2, 3, full(4)])
@pytest.mark.parametrize("to", [0, *(full(to) for to in (6, 10, 13, 16))])
def test_2bw_is_the_recurrence_with_a_delay_of_one(stages: int, to: int, tmp_path: Path) -> None:
    """Two counts of microbatches, or all of them in four parts."""
    fewest = max(1, stages - 1)
    after = {6: 0, 10: 6, 13: 10, 16: 13}
    counts = range(max(fewest, after[to] + 1), to + 1) if to else (fewest, stages + 1)
    cases = [
        Case(stages=stages, microbatches=count, optimizer=optimizer)
        for count in counts
        for optimizer in ("adamw", "sgd")
    ]
    check(cases, tmp_path, delay=1)


@pytest.mark.cases(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, full(4)])
def test_schedules_that_flush_are_plain_accumulation(schedule: str, stages: int, tmp_path: Path) -> None:
    cases = [
        Case(schedule=schedule, stages=stages, microbatches=count, optimizer=optimizer, max_norm=max_norm)
        for count in ((1, 3, 8) if stages > 2 else (1, 3))
        for optimizer, max_norm in (("adamw", None), ("sgd", 0.5), ("native-adamw", 0.5))
    ]
    check(cases, tmp_path, delay=0)


@pytest.mark.cases(1)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_pipedream_delays_each_stage_by_its_distance_from_the_last(stages: int, tmp_path: Path) -> None:
    cases = [
        Case(schedule="pipedream", stages=stages, microbatches=1, optimizer=optimizer)
        for optimizer in ("adamw", "sgd", "native-sgd")
    ]
    check(cases, tmp_path, delay=[stages - 1 - stage for stage in range(stages)])


@pytest.mark.parametrize("stages", [2, full(4)])
def test_vertical_sync_delays_all_stages_alike(stages: int, tmp_path: Path) -> None:
    cases = [Case(schedule="pipedream-sync", stages=stages, microbatches=1, optimizer=name) for name in OPTIMIZERS]
    check(cases, tmp_path, delay=[stages - 1] * stages)


@pytest.mark.parametrize("kind", ["2bw", full("1f1b"), full("gpipe")])
def test_a_schedule_in_a_text_of_the_users_own_is_run_as_it_says(kind: str, tmp_path: Path) -> None:
    check([Case(schedule=f"{kind}-text", stages=3, microbatches=4)], tmp_path, delay=1 if kind == "2bw" else 0)


@pytest.mark.parametrize("kind", ["2bw", full("1f1b")])
@pytest.mark.parametrize("stages", [2, full(3)])
def test_more_in_flight_gives_the_same(kind: str, stages: int, tmp_path: Path) -> None:
    fewest = 2 * (stages - 1)
    cases = [
        Case(schedule=f"{kind}-ahead", stages=stages, microbatches=fewest, counts=counts, optimizer=name, max_norm=norm)
        for counts, name, norm in (
            ((), "adamw", None),
            ((fewest + 3,), "native-adamw", 0.5),
            ((fewest, 1, 1, 7, 2), "sgd", 0.5),
        )
    ]
    check(cases, tmp_path, delay=1 if kind == "2bw" else 0)


@pytest.mark.cases(1)
@pytest.mark.parametrize("optimizer", ["native-adamw", "native-sgd", "adamw"])
@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.full), 3])
def test_clipping_is_that_of_the_whole_model(optimizer: str, stages: int, tmp_path: Path) -> None:
    cases = [
        Case(stages=stages, optimizer=optimizer, max_norm=max_norm, decays=decays)
        for max_norm, decays in ((0.3, False), (1.5, True))
    ]
    check(cases, tmp_path, delay=1)


@pytest.mark.parametrize("every", EVERY)
def test_batches_may_be_of_different_sizes(every: int, tmp_path: Path) -> None:
    cases = [
        Case(stages=3, counts=counts, max_norm=0.5, drains=drains, optimizer=optimizer)
        for counts in ((4, 1, 1, 7, 2), (5, 5, 3))
        for drains in ((), (0, 1, 6))
        for optimizer in ("adamw", "native-adamw")
    ]
    check(cases[::every], tmp_path, delay=1)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_recomputed_stages_give_the_same_with_dropout(schedule: str, tmp_path: Path) -> None:
    cases = [
        Case(schedule=schedule, stages=3, dropout=0.3, recompute=recompute, max_norm=1.0) for recompute in (False, True)
    ]
    check(cases, tmp_path, delay=1 if schedule == "2bw" else 0)


@pytest.mark.full
def test_evaluation_uses_the_newest_weights_and_changes_nothing(tmp_path: Path) -> None:
    cases = [
        Case(stages=3, evaluates=True, max_norm=1.0, steps=8, dropout=0.3, recompute=recompute, checkpoints=checkpoints)
        for recompute, checkpoints in ((False, False), (True, False), (False, True), (True, True))
    ]
    check(cases, tmp_path, delay=1)


@pytest.mark.parametrize(
    ("schedule", "stages", "ranks"), [full("gpipe", 4, 2), ("interleaved", 4, 2), full("2bw", 4, 2), full("2bw", 3, 1)]
)
@pytest.mark.parametrize("every", EVERY)
def test_more_stages_than_ranks_wrap_round(schedule: str, stages: int, ranks: int, every: int, tmp_path: Path) -> None:
    cases = [
        Case(schedule=schedule, stages=stages, microbatches=count, max_norm=max_norm, dropout=0.1, optimizer=optimizer)
        for count in (2, 5)
        for max_norm, optimizer in ((None, "adamw"), (0.5, "native-adamw"))
    ]
    check(cases[::every], tmp_path, delay=1 if schedule == "2bw" else 0, size=ranks)


@pytest.mark.parametrize(("stages", "replicas"), [full(1, 2), full(2, 2), (1, 3), full(2, 3)])
@pytest.mark.parametrize("every", EVERY)
def test_replicas_average_in_the_order_of_their_ranks(stages: int, replicas: int, every: int, tmp_path: Path) -> None:
    cases = [
        Case(stages=stages, replicas=replicas, optimizer=optimizer, max_norm=max_norm, dropout=0.2)
        for optimizer in ("adamw", "native-sgd")
        for max_norm in (None, 0.4)
    ]
    check(cases[::every], tmp_path, delay=1)


@pytest.mark.parametrize("optimizer", ["native-adamw", full("adamw")])
def test_a_loss_that_is_no_number_in_one_replica_skips_that_update_on_all_ranks(optimizer: str, tmp_path: Path) -> None:
    cases = [
        Case(schedule="2bw", stages=2, replicas=2, max_norm=0.5, spoils=(1, 3), steps=8, optimizer=optimizer),
    ]
    check(cases, tmp_path, delay=1)


def test_another_delay_is_another_training(tmp_path: Path) -> None:
    case = Case(stages=2)
    ranks = run_ranks(pipelines.train, case, folder=tmp_path)
    with pytest.raises(AssertionError, match="losses of step 1"):
        pipelines.same(ranks, pipelines.recurrence(case, 0), case, 0)
