"""``Pipeline(plan="auto")``: the ranks measure the model, and each finds the same plan from the first rank's times."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.errors import InvalidArgument, PlanError
from hydra_ext.pipeline.batch import as_microbatches
from hydra_ext.pipeline.planning.layout import Given, Layout
from hydra_ext.pipeline.planning.measuring import Measuring
from hydra_ext.pipeline.ranks.topology import Topology
from hydra_ext.pipeline.ranks.watch import Watch
from hydra_ext.pipeline.stages.splitting import compare, given_borders, made_ready
from hydra_ext.plan.pipelines.chains import measured_at
from hydra_ext.plan.pipelines.forecast import PipelinePlan
from hydra_ext.plan.pipelines.planning import update_seconds
from hydra_ext.plan.pipelines.question import KINDS, Cluster, Constraints, thinned
from hydra_ext.plan.pipelines.search import nothing_possible, search
from hydra_ext.profile import dtype_of
from hydra_ext.profile.cards import speed_of_this_machine
from hydra_ext.schedule import make

_STATE_COPIES = 2.0  # of the optimizer: those of Adam
_MOST_SIZES = 6  # of microbatches that are measured
_TURNS = 3  # of each size: all are measured before one is again


def check_plan(plan: object, given: Given, modules: int) -> None:
    """
    Raises:
        InvalidArgument: There is no such plan, or nothing to be planned.
    """
    if plan is None:
        return
    if plan != "auto":
        raise InvalidArgument(f"plan={plan!r}: give 'auto', or leave it out")
    if modules:
        raise InvalidArgument(
            "plan='auto' cuts a model, and the stages are given as modules: give the model, or no plan"
        )
    if given.schedule not in KINDS:
        raise InvalidArgument(f"plan='auto' with schedule={given.schedule!r}: give one of {', '.join(KINDS)}")


def planned_layout(
    given: Given,
    model: nn.Module,
    batch: Any,
    fn: Callable[[Any], Any],
    *,
    world: int,
    watch: Watch,
    device: torch.device,
    budget: int | None,
    seed: int,
) -> tuple[Layout, PipelinePlan]:
    """Plans the pipeline. All ranks have to call it, with the same batch.

    Args:
        given: What the user gives, which is kept.
        model: Whole, or on meta.
        batch: All samples of a step: tensors, which may be cut anywhere, or a list of microbatches.
        fn: Returns the loss of a microbatch.
        world: Number of ranks.
        watch: The ranks.
        device: Where this rank computes.
        budget: Device bytes of a rank; None for no limit.
        seed: The seed of all random numbers.

    Raises:
        PlanDoesNotFit: No plan stays within the budget.
        PlanError: The constraints contradict each other, or the batch.
        SplitError: The model cannot be cut.
    """
    made_ready(model, device)
    constraints = _constraints(given, batch)
    sizes = thinned(constraints.sizes(world), _MOST_SIZES)
    if not sizes:
        raise nothing_possible(constraints, world)
    measuring = Measuring(model, fn, watch=watch, device=device, seed=seed, counts_bytes=budget is not None)
    rehearsals = {
        samples: measuring.rehearsal(_microbatch(batch, constraints.batch, samples), samples) for samples in sizes
    }
    if given.cuts is not None:
        for rehearsal in rehearsals.values():
            borders = given_borders(rehearsal, len(given.cuts) + 1, given.cuts)
            constraints = replace(constraints, cuts=tuple(borders[1:-1]))
    turns: dict[int, list[list[float]]] = {samples: [] for samples in sizes}
    for turn in range(_TURNS):
        for samples, rehearsal in rehearsals.items():
            microbatch = _microbatch(batch, constraints.batch, samples)
            turns[samples].append(measuring.seconds(microbatch, samples, rehearsal, turn))
    chains = [
        measuring.chain(_microbatch(batch, constraints.batch, samples), samples, rehearsals[samples], turns[samples])
        for samples in sizes
    ]
    cluster = _cluster(measuring, world, device, dtype_of(model), budget)
    plan = search(measured_at(chains), cluster, replace(constraints, samples=tuple(sizes)))
    compare(repr((plan.choice, plan.cuts)), "found another plan than rank 0", watch, where="to follow one plan")
    return _layout(plan), plan


def _cluster(measuring: Measuring, world: int, device: torch.device, dtype: torch.dtype, budget: int | None) -> Cluster:
    (memory_speed,) = measuring.common("to plan updates", [speed_of_this_machine(device, dtype).bytes_per_second])
    bytes_per_second, latency = measuring.link(world)
    return Cluster(
        devices=world,
        bytes_per_second=bytes_per_second,
        latency=latency,
        overlap=device.type != "cpu",  # there messages take the time of the cores that compute
        update_seconds=update_seconds(memory_speed, _STATE_COPIES),
        state_copies=_STATE_COPIES,
        weights_at_home=budget is not None,
        budget=budget,
    )


def _constraints(given: Given, batch: Any) -> Constraints:
    stages = given.stages if given.cuts is None else len(given.cuts) + 1
    if given.stages not in (None, stages):
        raise PlanError(f"stages={given.stages} and cuts={given.cuts!r} contradict each other: give one of them")
    return Constraints(
        batch=len(as_microbatches(batch, sys.maxsize)),
        schedules=(str(given.schedule),),
        width=given.replicas,
        stages=stages,
        microbatches=given.microbatches,
        samples=None if isinstance(batch, (Tensor, Mapping)) else (1,),
        recompute=given.recompute,
    )


def _microbatch(batch: Any, rows: int, samples: int) -> Any:
    """The first microbatch of so many samples."""
    return as_microbatches(batch, rows // samples)[0]


def _layout(plan: PipelinePlan) -> Layout:
    choice = plan.choice
    return Layout(
        topology=Topology.here(choice.width),
        schedule=make(choice.schedule, stages=choice.stages, ranks=choice.depth, microbatches=choice.microbatches),
        microbatches=choice.microbatches,
        recompute=choice.recompute,
        cuts=plan.cuts,
        shares=True,
    )
