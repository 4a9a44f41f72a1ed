"""Compares a fleet's results with each job alone in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hydra_ext.fleet import Job, Results
from support.fleet.trainings import loaded, plainly


def assert_as_alone(results: Results, jobs: Sequence[Job], *, first: int = 1) -> None:
    """Losses from a step on, evaluation, weights and buffers of each job, bit for bit."""
    assert results.threads is not None
    for job in jobs:
        weights, losses, evaluation = plainly(job, threads=results.threads)
        result = results[job.name]
        assert result.is_done, result.failures
        assert [result.losses[step] for step in range(first, job.steps + 1)] == losses[first - 1 :]
        assert result.evaluation == evaluation
        found = loaded(result.folder, job)
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weights[name]) for name in weights)
