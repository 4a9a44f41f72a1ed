"""A rank that fails before the first step ends all of them, wherever they wait for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.pipeline import pipeline_set_up
from support.pipeline.pipeline_failures import LIMIT_SECONDS, run_to_the_end, seconds_after_the_failure
from support.pipeline.pipeline_set_up import FAILING, FailingSetUp
from support.ranks import run_ranks


@pytest.mark.cases(1)
@pytest.mark.parametrize("how", ["raise", "kill"])
@pytest.mark.parametrize("where", ["optimizer", "builder", "rehearsal", "connecting", "copying"])
def test_a_rank_that_fails_before_the_first_step_ends_all_of_them(how: str, where: str, tmp_path: Path) -> None:
    # A rank that is killed is missed after the patience, and one that raises while others wait in torch.distributed.
    missed = how == "kill" or where in ("connecting", "copying")
    failing = FailingSetUp(how, where, patience=4.0 if missed else 20.0)
    without = [FAILING] if how == "raise" else []
    ended = run_to_the_end(pipeline_set_up.set_up, failing, tmp_path, folder=tmp_path, size=2, without=without)
    assert ended[0]["kind"] == "RankFailed"
    assert f"rank {FAILING} has failed" in ended[0]["error"]
    if how == "raise":
        assert "at the start: ValueError: the data are wrong" in ended[0]["error"]
        assert ended[FAILING]["kind"] == "ValueError"
    else:
        assert "no sign of life" in ended[0]["error"]
    for record in ended.values():
        # A constructor that fails does not wait for its watch, which ends by itself.
        assert set(record["left"]["threads"]) <= {"hydra_ext watch"}
        assert record["left"]["groups"] == 0
    if where != "rehearsal":
        assert ended[0]["as built"] == [True]
    assert seconds_after_the_failure(ended, tmp_path, [0]) < LIMIT_SECONDS


def test_replicas_write_only_to_what_differs(tmp_path: Path) -> None:
    first, other = run_ranks(pipeline_set_up.replicas_with_expanded_buffers, folder=tmp_path)
    assert first[0] == other[0]
    assert float(first[0]) > 0
    assert other[1].startswith("UnsupportedModel: 'mask' of stage 0 has other numbers here")
    assert first[-1].startswith("RankFailed: rank 1 has failed")
