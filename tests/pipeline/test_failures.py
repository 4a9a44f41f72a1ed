"""When one rank fails all ranks end, and all name the first cause."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from support.pipeline import pipeline_failures
from support.pipeline.pipeline_failures import (
    LIMIT_SECONDS,
    Failing,
    run_to_the_end,
    seconds_after_the_failure,
    train_after_failures,
)
from support.ranks import run_ranks

_random = random.Random(11)
_PLACES = [
    (stage, _random.randrange(1, 4), _random.randrange(4), _random.random() < 0.5, _random.choice(["2bw", "1f1b"]))
    for stage in [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1]
]


def run(failing: Failing, folder: Path) -> dict[int, dict[str, Any]]:
    """What each rank ended with, but for one that was killed or stopped."""
    without = [failing.stage] if failing.how == "stop" else []
    train = pipeline_failures.train
    size = failing.stages * failing.replicas
    return run_to_the_end(train, failing, folder, folder=folder, size=size, without=without)


@pytest.mark.parametrize("how", ["kill", "raise"])
@pytest.mark.parametrize(
    "place",
    [pytest.param(place, marks=[] if number < 3 else [pytest.mark.full]) for number, place in enumerate(_PLACES)],
    ids=lambda place: "stage{}-step{}-microbatch{}-{}-{}".format(*place[:3], "B" if place[3] else "F", place[4]),
)
def test_a_rank_that_fails_ends_all_of_them(how: str, place: tuple[int, int, int, bool, str], tmp_path: Path) -> None:
    stage, step, microbatch, backward, schedule = place
    failing = Failing(how, stage, step, microbatch, backward=backward, schedule=schedule)
    ended = run(failing, tmp_path)
    others = set(range(3)) - {stage}
    assert others <= set(ended)
    messages = {ended[rank]["error"] for rank in others}
    assert {ended[rank]["kind"] for rank in others} == {"RankFailed"}
    assert len(messages) == 1  # the first cause
    (message,) = messages
    assert f"rank {stage} has failed" in message
    assert f"in stage {stage}" in message
    if how == "raise":
        way = "backward" if backward else "forward"
        assert f"in the {way} of microbatch {microbatch} of batch {step}" in message
        assert "ValueError: the data are wrong" in message
        assert ended[stage]["kind"] == "ValueError"
    else:
        assert "its process has ended" in message
    assert seconds_after_the_failure(ended, tmp_path, others) < LIMIT_SECONDS


def test_a_rank_that_was_stopped_is_named(tmp_path: Path) -> None:
    ended = run(Failing("stop", 1, 2, 3, patience=4.0), tmp_path)
    assert set(ended) == {0, 2}
    assert seconds_after_the_failure(ended, tmp_path, {0, 2}) < LIMIT_SECONDS
    for record in ended.values():
        assert "rank 1 has failed (last seen " in record["error"]
        assert "no sign of life" in record["error"]


@pytest.mark.full
def test_a_replica_that_is_killed_is_named_by_the_others(tmp_path: Path) -> None:
    """Nothing but the gradients' reduction connects them: its error says no rank."""
    ended = run(Failing("kill", 0, 2, 1, schedule="1f1b", stages=1, replicas=2, patience=4.0), tmp_path)
    assert "rank 1 has failed (last seen " in ended[0]["error"]
    assert "no sign of life" in ended[0]["error"]
    assert seconds_after_the_failure(ended, tmp_path, {0}) < LIMIT_SECONDS


@pytest.mark.parametrize("how", ["interrupt", "leave"])
def test_an_interrupt_and_an_early_end_reach_all(how: str, tmp_path: Path) -> None:
    ended = run(Failing(how, 1, 2, 1), tmp_path)
    assert {0, 2} <= set(ended)
    assert seconds_after_the_failure(ended, tmp_path, {0, 2}) < LIMIT_SECONDS
    for rank in (0, 2):
        assert ended[rank]["kind"] == "RankFailed"
        assert "rank 1 has failed" in ended[rank]["error"]
    if how == "interrupt":
        assert ended[1]["kind"] == "KeyboardInterrupt"
        assert "KeyboardInterrupt" in ended[0]["error"]


def test_a_failed_pipeline_leaves_neither_threads_nor_process_groups_and_the_next_one_trains(tmp_path: Path) -> None:
    nothing = {"threads": [], "groups": 0}
    (left, errors, losses), (left_too, errors_too, losses_too) = run_ranks(train_after_failures, folder=tmp_path)
    assert left == left_too == [nothing] * 3
    assert len(errors) == 2
    assert all("rank 1 has failed in the forward of microbatch 1 of batch 1" in error for error in errors)
    assert errors_too == ["the data are wrong"] * 2
    assert losses == losses_too
    assert len(losses) == 3
