"""Two and more ranks, each with a copy of the model offloaded, beside one process that averages their gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.ranks import run_ranks
from support.replicated import Job, differences, train, train_together

JOBS = {
    "one microbatch": Job(m=(1,)),
    "three microbatches, clipped": Job(m=(3,), max_norm=0.5, round_size=3),
    "several rounds": Job(m=(3,), round_size=2, max_norm=0.5),
    "rounds of one microbatch": Job(m=(3,), round_size=1),
    "recomputed": Job(m=(3,), round_size=3, recompute=True),
    "ranks with different numbers of microbatches": Job(m=(1, 4), max_norm=0.5),
    "ways of the batch's own": Job("dynamic", m=(2,)),
    "experts": Job("experts", m=(3, 2), max_norm=0.5),
    "experts in rounds": Job("experts", m=(3, 2), round_size=2),
    "batch statistics of each rank": Job("normed", m=(2,)),
    "bfloat16, our optimizer, clipped": Job(optimizer="ours", dtype=torch.bfloat16, max_norm=0.1),
    "our optimizer": Job("tied_llama", m=(2,), optimizer="ours"),
    "plain loop": Job(m=(1,), loop="plain", max_norm=0.5),
    "plain loop that averages sums": Job(m=(2,), loop="plain", max_norm=0.5),
    "plain loop without synchronisation": Job(m=(3, 2), loop="no_sync"),
    "plain loop, experts": Job("experts", m=(2,), loop="plain", optimizer="ours", max_norm=0.1),
}


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_two_ranks_are_one_process_with_the_averaged_gradients_to_the_bit(job: Job, tmp_path: Path) -> None:
    expected = train_together(job)
    seen = run_ranks(train, job, folder=tmp_path)
    folded = job.optimizer == "ours" and job.loop == "step" and job.max_norm is not None
    kinds = {"losses", "norms", "gradients", "parameters", "buffers", "state"} - ({"gradients"} if folded else set())
    for ours, plain in zip(seen, expected, strict=True):
        assert [found for kind in sorted(kinds) for found in differences(ours[kind], plain[kind], kind)] == []
        report = ours["report"]
        assert report["windows"] > 0
        assert report["evictions"] > 0
        assert report["refusals"] == report["fallbacks"] == 0
        assert report["ranks"] == 2
    assert differences(seen[1]["parameters"], seen[0]["parameters"]) == []
