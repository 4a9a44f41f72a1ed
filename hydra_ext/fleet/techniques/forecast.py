"""What a job's step needs, before it runs: the dry run of :func:`hydra_ext.plan.fit`."""

from __future__ import annotations

from typing import Any

from torch import nn

from hydra_ext.errors import BudgetTooSmall, HostBudgetTooSmall, NotOnFakeTensors
from hydra_ext.fleet.job import Job
from hydra_ext.fleet.techniques.building import Batches, build_model
from hydra_ext.fleet.techniques.interface import WontDo
from hydra_ext.plan import fit


def first_step(job: Job) -> tuple[nn.Module, list[Any]]:
    """The job's model and the microbatches of its first step."""
    model = build_model(job)
    return model, list(Batches(job).of_step(0))


def plain_bytes(job: Job) -> int:
    """Bytes of weights, gradients and the activations of one microbatch."""
    model, microbatches = first_step(job)
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    try:
        plan = fit(model, microbatches[0], lambda each: job.loss(model, each), microbatches=1, round_size=1)
    except NotOnFakeTensors:  # a model on meta whose loss needs numbers: a trial will tell
        return trained
    return plan.ideal_bytes + trained


def expect_fit(job: Job, budget: int, *, parts: int = 1) -> None:
    """
    Args:
        budget: Of the device.
        parts: Equal parts of the budget, of which the job has one.

    Raises:
        WontDo: No plan for offloading fits the budget.
    """
    model, microbatches = first_step(job)
    try:
        fit(
            model,
            microbatches[0],
            lambda each: job.loss(model, each),
            microbatches=len(microbatches),
            budget=budget // parts,
        )
    except BudgetTooSmall as error:
        part = "" if parts == 1 else f"its part of a device that {parts} jobs share is too small: "
        raise WontDo(f"{part}{error}", smallest_budget=parts * error.smallest_budget) from error
    except HostBudgetTooSmall as error:
        raise WontDo(str(error)) from error
    except NotOnFakeTensors:
        return
