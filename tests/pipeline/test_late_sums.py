"""Weights that several ranks train need a schedule that leaves time to add up their gradients."""

from __future__ import annotations

from pathlib import Path

from support.pipeline import pipeline_late_sums
from support.ranks import run_ranks


def test_a_sum_over_ranks_that_comes_too_late_is_refused(tmp_path: Path) -> None:
    for given, plain, *others in run_ranks(
        pipeline_late_sums.errors, ["pipedream", "2bw", "1f1b"], folder=tmp_path, size=3
    ):
        assert "UnsupportedModel: a weight is trained by stages [0, 2], which are on several ranks" in given
        assert "UnsupportedModel: '0.0.embedding.weight' is trained by stages [0, 2]" in plain
        assert given.endswith("use schedule='2bw', or give each stage a weight of its own")
        assert others == [""] * 4
