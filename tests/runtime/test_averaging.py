"""Two and more ranks, each with a copy of the model offloaded, beside one process that averages their gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.ranks import run_ranks
from support.replicas.replicated import Job, differences, tight_budget, train, train_together
from support.replicas.replicated_cases import (
    AT_THE_END,
    BlockSeen,
    assigned,
    follow_blocks,
    leave,
    overflow,
    overflow_scaled,
    own_gradients,
    refuse,
    refuse_together,
    ways,
)

JOBS = {
    "one microbatch": Job(m=(1,)),
    "three microbatches, clipped": Job(m=(3,), max_norm=0.5, round_size=3),
    "several rounds": Job(m=(3,), round_size=2, max_norm=0.5),
    "rounds of one microbatch": Job(m=(3,), round_size=1),
    "rounds as planned": Job(m=(3, 4), max_norm=0.5, activations="auto"),
    "recomputed": Job(m=(3,), round_size=3, recompute=True),
    "ranks with different numbers of microbatches": Job(m=(1, 4), max_norm=0.5),
    "ways of the batch's own": Job("dynamic", m=(2,)),
    "experts": Job("experts", m=(3, 2), max_norm=0.5),
    "experts in rounds": Job("experts", m=(3, 2), round_size=2),
    "backwards inside the backward": Job(m=(2,), nested=True),
    "batch statistics of each rank": Job("normed", m=(2,)),
    "bfloat16, our optimizer, clipped": Job(optimizer="ours", dtype=torch.bfloat16, max_norm=0.1),
    "our optimizer": Job("tied_llama", m=(2,), optimizer="ours"),
    "plain loop": Job(m=(1,), loop="plain", max_norm=0.5),
    "plain loop with backwards inside the backward": Job(m=(1,), loop="plain", nested=True),
    "plain loop that averages sums": Job(m=(2,), loop="plain", max_norm=0.5),
    "plain loop without synchronisation": Job(m=(3, 2), loop="no_sync"),
    "plain loop, experts": Job("experts", m=(2,), loop="plain", optimizer="ours", max_norm=0.1),
}

# Others have what these are about, too.
LONG = {
    "one microbatch",
    "several rounds",
    "rounds of one microbatch",
    "experts in rounds",
    "our optimizer",
    "plain loop",
}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "job",
    [pytest.param(job, id=name, marks=[pytest.mark.full] if name in LONG else []) for name, job in JOBS.items()],
)
def test_two_ranks_are_one_process_with_the_averaged_gradients_to_the_bit(job: Job, tmp_path: Path) -> None:
    expected = train_together(job)
    seen = run_ranks(train, job, tight_budget(job), folder=tmp_path)
    folded = job.optimizer == "ours" and job.loop == "step" and job.max_norm is not None
    kinds = {"losses", "norms", "gradients", "parameters", "buffers", "state"} - ({"gradients"} if folded else set())
    for ours, plain in zip(seen, expected, strict=True):
        assert [found for kind in sorted(kinds) for found in differences(ours[kind], plain[kind], kind)] == []
        report = ours["report"]
        assert report["windows"] > 0
        assert report["refusals"] == report["fallbacks"] == 0
        assert report["ranks"] == 2
    # The weights of that one are less than what its activations vary by.
    moved = any(ours["report"]["evictions"] > 0 for ours in seen)
    assert moved or job.family == "normed" or job.activations == "auto"
    assert differences(seen[1]["parameters"], seen[0]["parameters"]) == []


@pytest.mark.cases(1)
@pytest.mark.parametrize("job", [JOBS["one microbatch"], JOBS["several rounds"], JOBS["plain loop that averages sums"]])
def test_what_a_rank_reduces_is_every_trained_byte_once_a_step(job: Job, tmp_path: Path) -> None:
    trained = sum(parameter.nbytes for parameter in job.make(0)[0].parameters())
    passes = job.steps * (job.m[0] if job.loop == "plain" else 1)
    for seen in run_ranks(train, job, 2**30, folder=tmp_path):
        assert seen["report"]["reduced_bytes"] == passes * trained
        assert seen["report"]["waited_for_ranks_seconds"] > 0
        assert f"ranks    2, gradients averaged {passes * trained / 2**20:,.1f} MiB" in seen["text"]


def test_ranks_do_go_different_ways_in_these_tests() -> None:
    """Some gradients are one rank's alone, and some are no rank's."""
    dynamic, experts = (list(ways(JOBS[name])) for name in ("ways of the batch's own", "experts"))
    for steps in (dynamic, experts):
        assert any((a is None) is not (b is None) for step in steps for a, b in step)
    assert any(a is None and b is None for step in dynamic for a, b in step)


@pytest.mark.cases(1)
@pytest.mark.parametrize("round_size", [2, 1])
def test_blocks_are_averaged_behind_the_backward_of_the_blocks_before_them(round_size: int, tmp_path: Path) -> None:
    job = Job(m=(2,), round_size=round_size, recompute=False)
    for found in run_ranks(follow_blocks, job, folder=tmp_path):
        blocks = [BlockSeen(**seen) for seen in found]
        assert [seen.block for seen in blocks] == list(range(len(blocks)))[::-1]
        early = [seen for seen in blocks if seen.issued < AT_THE_END]
        assert len(early) > len(blocks) // 2
        for seen in early:
            assert seen.delivered > seen.issued
            assert seen.from_device is (round_size == 2)
            # On its way to the host it is let be for as long as the next block takes.
            assert seen.issued > seen.finished if round_size == 1 else seen.issued >= seen.finished
        assert any(seen.issued == seen.finished for seen in early) is (round_size == 2)


def test_what_no_backward_has_brought_stays_as_it_is(tmp_path: Path) -> None:
    """The first weight gets a gradient of 1 on every rank, the second in the second case on the first rank."""
    first, second = run_ranks(assigned, folder=tmp_path)
    assert first == [[1.5, 0.0], [1.5, 1.0]]
    assert second == [[1.5, 1.0], [1.5, 1.0]]


@pytest.mark.full
def test_three_ranks_are_equal_to_one_another_and_within_the_bound(tmp_path: Path) -> None:
    job = Job(m=(2,), steps=1, optimizer="sgd")
    seen = run_ranks(train, job, tight_budget(job), folder=tmp_path, size=3)
    assert all(differences(one["parameters"], seen[0]["parameters"]) == [] for one in seen)
    for index, mean in enumerate(seen[0]["gradients"][0]):
        parts = torch.stack([gradients[index] for gradients in own_gradients(job, 3)])
        assert not torch.equal(mean, parts[0])
        exact, sizes = parts.double().mean(0), parts.double().abs().mean(0)
        roundings = torch.finfo(mean.dtype).eps / 2 * (2 * sizes + exact.abs())
        assert ((mean.double() - exact).abs() <= 1.001 * roundings).all()


def test_a_norm_that_is_infinite_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    for skipped, before, after in run_ranks(overflow, folder=tmp_path):
        assert skipped == [True, False]
        assert differences(before[1], before[0]) == []
        assert differences(after, before[1]) != []


@pytest.mark.full
def test_a_scaler_that_finds_infinities_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    scales = run_ranks(overflow_scaled, folder=tmp_path)
    assert scales[0] == scales[1] == [512.0, 512.0]


@pytest.mark.full
def test_microbatches_that_cannot_share_a_round_on_one_rank_are_averaged_all_the_same(tmp_path: Path) -> None:
    expected, seen = refuse_together(), run_ranks(refuse, folder=tmp_path)
    for rank, (parameters, fallbacks) in enumerate(seen):
        assert differences(parameters, expected) == []
        assert (fallbacks > 0) is (rank == 1)


def test_nothing_is_left_of_the_ranks_when_the_context_has_ended(tmp_path: Path) -> None:
    for threads_before, threads_after, group_lives in run_ranks(leave, folder=tmp_path):
        assert threads_after == threads_before
        assert not group_lives
