"""Ranks that average gradients of blocks whose home is the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.ranks import run_ranks
from support.replicas.replicated import Job, differences, train_together
from support.replicas.replicated_homes import train_at_home

JOBS = {
    "rounds": Job(m=(2,), steps=8, optimizer="ours", max_norm=0.1),
    "rounds, bfloat16": Job(m=(2, 3), steps=8, optimizer="ours", dtype=torch.bfloat16),
    "several rounds": Job(m=(3,), steps=8, optimizer="ours", round_size=2),
    "experts": Job("experts", m=(3, 2), steps=8, optimizer="ours"),
    "plain loop that averages sums": Job(m=(2,), steps=8, loop="plain", optimizer="ours", max_norm=0.5),
    "plain loop without synchronisation": Job(m=(3, 2), steps=8, loop="no_sync", optimizer="ours"),
}


FEW = [("several rounds", None), ("plain loop without synchronisation", "_gathered")]
MOMENTS = [
    pytest.param(name, moment, marks=[] if (name, moment) in FEW else pytest.mark.full)
    for name in JOBS
    for moment in (None, "_gathered", "_begin")
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "moment"), MOMENTS)
def test_a_block_may_be_at_home_or_leave_at_any_moment_and_the_mean_is_the_mean(
    name: str, moment: str | None, tmp_path: Path
) -> None:
    job = JOBS[name]
    expected = train_together(job)
    for ours, plain in zip(run_ranks(train_at_home, job, moment, folder=tmp_path), expected, strict=True):
        for kind in ("losses", "norms", "state"):
            assert differences(ours[kind], plain[kind], kind) == []
        assert differences(ours["parameters"], plain["parameters"][-1:]) == []
        assert ours["settled"] > 0, ours["report"]["homes_reason"]
        # A gradient that only other ranks have is averaged on the host: its block comes there.
        assert (ours["returned"] > 0) is (moment is not None or job.family == "experts")
        if moment is None:
            assert len(ours["report"]["homes"]) > 1
