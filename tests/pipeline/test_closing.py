"""A pipeline ends on all ranks together, with everything delivered; a rank that lives is waited for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hydra_ext.errors import RankFailed
from hydra_ext.pipeline import Pipeline
from hydra_ext.pipeline.ranks.watch import Failure
from support.pipeline import pipeline_closing, pipelines
from support.pipeline.pipeline_failures import LIMIT_SECONDS, run_to_the_end, seconds_after_the_failure
from support.ranks import run_ranks


def test_losses_can_be_read_after_the_end(tmp_path: Path) -> None:
    ranks = run_ranks(pipeline_closing.losses_after_the_end, tmp_path, folder=tmp_path, size=3)
    known, losses = zip(*ranks, strict=True)
    assert all(all(each) for each in known)
    assert losses[0] == losses[1] == losses[2]


def test_a_rank_that_comes_late_to_the_end_is_waited_for(tmp_path: Path) -> None:
    results = []
    for late in (False, True):
        folder = tmp_path / str(late)
        folder.mkdir()
        results.append(run_ranks(pipeline_closing.close_late, late, folder, folder=folder, size=3))
    for in_time, late in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(in_time, late, strict=True))


@pytest.mark.parametrize("how", [pytest.param("kill", marks=pytest.mark.full), "exit"])
def test_a_rank_that_does_not_come_to_the_end_has_failed(how: str, tmp_path: Path) -> None:
    ended = run_to_the_end(pipeline_closing.close_alone, how, tmp_path, folder=tmp_path, size=3)
    for rank in (0, 1):
        assert ended[rank]["kind"] == "RankFailed"
        assert "rank 2 has failed" in ended[rank]["error"]
        if how == "exit":
            assert "it has ended its pipeline, and this rank waits for it at the end" in ended[rank]["error"]
    assert seconds_after_the_failure(ended, tmp_path, {0, 1}) < LIMIT_SECONDS


def test_a_pipeline_without_a_step_can_be_closed(tmp_path: Path) -> None:
    assert run_ranks(pipeline_closing.close_unused, folder=tmp_path) == [None, None]


@pytest.mark.parametrize("expected", [0, 1, 2])
def test_a_link_that_was_closed_still_gives_what_was_expected_and_then_says_that_it_has_ended(
    expected: int, tmp_path: Path
) -> None:
    _, taken = run_ranks(pipeline_closing.end_of_a_link, expected, folder=tmp_path)
    assert taken[:expected] == ["0.0", "1.0"][:expected]
    if expected < 2:
        assert "it has closed its pipeline, and this rank still waits for it" in taken[expected]


@pytest.mark.full
def test_a_pipeline_that_was_not_closed_is_warned_about_whatever_became_of_others() -> None:
    program = """
import logging
from hydra_ext.pipeline import Pipeline
from support.pipeline import pipelines
logging.basicConfig()
first, second = (Pipeline(None, pipelines.sgd, stages=pipelines.make_stages(1), microbatches=1) for _ in range(2))
first.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.count("the pipeline was not closed") == 1


def known_to_have_failed() -> Pipeline:
    """Between two steps it has come to be known that another rank has failed."""
    pipe = Pipeline(None, pipelines.sgd, stages=pipelines.make_stages(1), microbatches=1)
    pipe.step([pipelines.make_microbatch(0, 0)], pipelines.loss_of)
    pipe._watch.fail(Failure(1, "", "its process has ended"))
    return pipe


def test_a_failure_that_no_rank_was_told_of_is_an_error_of_the_end() -> None:
    pipe = known_to_have_failed()
    with pytest.raises(RankFailed, match="rank 1 has failed: its process has ended"):
        pipe.close()
    pipe.close()
    with pytest.raises(RankFailed, match="rank 1 has failed"), known_to_have_failed():
        pass


def test_a_failure_that_was_told_before_is_none_of_the_end() -> None:
    pipe = known_to_have_failed()
    with pytest.raises(RankFailed, match="rank 1 has failed"):
        pipe.drain()
    pipe.close()


def test_an_error_of_the_users_own_is_not_hidden_by_a_failure() -> None:
    with pytest.raises(ValueError, match="of the user's own"), known_to_have_failed():
        raise ValueError("of the user's own")
