"""Whether a model's training step fits a device, and how fast it is, before anything runs.

A dry run on fake tensors gives one microbatch's figures, or a real microbatch, where numbers are needed. The planner of
activations then says what a step should keep, move and compute again under a budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from hydra_ext import _C
from hydra_ext.errors import InvalidArgument, NotOnFakeTensors, PlanError
from hydra_ext.heads.calls import Heads
from hydra_ext.plan.steps.answer import answer
from hydra_ext.plan.steps.forecast import Plan
from hydra_ext.plan.steps.problem import Homes, StepProblem, StepSetting
from hydra_ext.policy import parse_bytes
from hydra_ext.profile.cards import USABLE, Card, bytes_per_second, card_named, link_of, speed_of_this_machine
from hydra_ext.profile.dry_run import dry_run, dtype_of
from hydra_ext.profile.real_run import has_numbers, real_run
from hydra_ext.state.composites import inner_tensors

Example = TypeVar("Example")

_MOST = 2  # times what a head takes: a smaller budget that is enough is set by the head


def fit(
    model: nn.Module,
    example: Example,
    fn: Callable[[Example], Any],
    *,
    microbatches: int = 4,
    round_size: int | None = None,
    recompute: bool = True,
    budget: int | str | None = None,
    host_budget: int | str | None = None,
    optimizer: torch.optim.Optimizer | float = 0.0,
    device: Card | str | None = None,
    link: float | str | None = None,
    disk: float | str | None = None,
    param_dtype: torch.dtype | None = None,
    update_seconds: float | None = None,
    inexact_heads: bool = False,
) -> Plan:
    """Plans a training step from a dry run, which makes no step and takes no memory.

    Where ``fn`` reads numbers, a real microbatch runs in its place, on the model's device. It changes nothing but what
    ``fn`` does elsewhere. Seconds come from speeds that are peaks; plans compare.

    Args:
        model: Any module, also one on meta.
        example: One microbatch. Only a real one reads its numbers.
        fn: As in ``run.step``: returns the loss of ``example``, alone or with metrics.
        microbatches: Of a step.
        round_size: Microbatches that run together; by default the planner chooses.
        recompute: Whether modules may run again in backward.
        budget: Device bytes. None takes the card's memory, or without a card as much as all activations take.
        host_budget: Bytes that the host may hold. Weights, gradients and state beyond it take no time.
        optimizer: Whose state is on the host, too: one of :mod:`hydra_ext.optim`, or bytes for each trained parameter.
        device: The name of a known card, such as ``"rtx4090-24"``, or a card's figures; None for this machine.
        link: Bytes a second between host and device, each way; None for the card's, or without a card for no limit.
        disk: Bytes a second of the disk, each way, for activations beyond ``host_budget``; None if they have to fit.
        param_dtype: Dtype in which weights compute; by default the model's own.
        update_seconds: Of an update, behind the next round; None for what it moves at the speed of the host's memory.
        inexact_heads: As in :class:`hydra_ext.Auto`. A card, whose kernels are not here, has no heads in rows without.

    Raises:
        BudgetTooSmall: No plan fits. The error names the budget that would do, and the moment that needs it.
        HostBudgetTooSmall: The host cannot hold the activations that have to leave the device.
        NotOnFakeTensors: ``fn`` needs numbers, and the model or the example has none.
        InvalidArgument: The card is unknown, a number is not positive, or arguments contradict each other.
    """
    card = card_named(device) if isinstance(device, str) else device
    lane, held = link_of(link, card), _held_by_host(model, optimizer)
    setting = StepSetting(
        microbatches=_checked_count(microbatches),
        to_device=lane,
        to_host=lane,
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        update_seconds=_update_seconds(held, card) if update_seconds is None else update_seconds,
        round_sizes=_round_sizes(round_size, microbatches),
        recompute=recompute,
    )
    homes = _homes(held, host_budget, disk, on_device=host_budget is None and bool(optimizer))
    problem_with = partial(_problem_with, model, example, fn, param_dtype, card, setting, homes)
    return _answered(problem_with, model, budget, card, inexact_heads=inexact_heads)


def _answered(
    problem_with: Callable[[Heads], tuple[StepProblem, str | None]],
    model: nn.Module,
    given: int | str | None,
    card: Card | None,
    *,
    inexact_heads: bool,
) -> Plan:
    """The plan with plain heads, or where these do not fit, with heads in rows."""
    plain, in_rows = Heads(model, None, exact=False), Heads(model, 0, exact=not inexact_heads)
    asked = None if given is None else parse_bytes(given)
    problem, because = problem_with(plain)
    budget = _most(problem, card) if asked is None else asked
    leanest = problem
    if (card is None or inexact_heads) and _binds(plain, problem):
        leanest = min(problem, problem_with(in_rows)[0], key=lambda each: each.least_bytes)
    chosen = leanest if budget < problem.least_bytes else problem
    return answer(
        chosen,
        budget,
        _solved(chosen, budget),
        measured_because=because,
        least_bytes=leanest.least_bytes,
        heads_in_rows=() if chosen is problem else in_rows.in_rows,
    )


def _most(problem: StepProblem, card: Card | None) -> int:
    return problem.ideal_bytes if card is None else int(card.memory_bytes * USABLE)


def _binds(heads: Heads, problem: StepProblem) -> bool:
    """Whether a head takes most of what the smallest budget has to hold."""
    most = max((shape.least_bytes for shape in heads.seen.values()), default=0)
    return _MOST * most >= problem.least_bytes


def _problem_with(
    model: nn.Module,
    example: Example,
    fn: Callable[[Example], Any],
    param_dtype: torch.dtype | None,
    card: Card | None,
    setting: StepSetting,
    homes: Homes,
    heads: Heads,
) -> tuple[StepProblem, str | None]:
    """The planner's problem, and why a microbatch had to be a real one."""
    speed = None if card is None else card.speed(param_dtype or dtype_of(model))
    try:
        profile, because = dry_run(model, example, fn, param_dtype=param_dtype, speed=speed, heads=heads), ""
    except NotOnFakeTensors as error:
        if not has_numbers(model, example):
            raise
        profile, because = real_run(model, example, fn, param_dtype=param_dtype, speed=speed, heads=heads), error.reason
    return StepProblem(profile, setting, homes), because or None


def _solved(problem: StepProblem, budget: int) -> _C.ActivationPlan:
    if budget < problem.least_bytes:
        raise problem.too_small(budget)
    try:
        return problem.solve(budget)
    except PlanError as error:
        raise problem.host_too_small(budget) from error


def _checked_count(microbatches: int) -> int:
    if microbatches < 1:
        raise InvalidArgument(f"microbatches={microbatches}: a step has at least one")
    return microbatches


def _round_sizes(round_size: int | None, microbatches: int) -> tuple[int, ...]:
    if round_size is None:
        return ()
    if not 1 <= round_size <= microbatches:
        raise InvalidArgument(
            f"round_size={round_size} contradicts microbatches={microbatches}: a round has 1 to {microbatches} of them"
        )
    return (round_size,)


@dataclass(frozen=True, kw_only=True)
class _HeldByHost:
    """Bytes of a model's weights, of trained ones, which their gradients take, too, and of the optimizer's state."""

    weights: int
    trained: int
    state: int

    @property
    def all(self) -> int:
        return self.weights + self.trained + self.state


def _held_by_host(model: nn.Module, optimizer: torch.optim.Optimizer | float) -> _HeldByHost:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if isinstance(optimizer, torch.optim.Optimizer):
        if not hasattr(optimizer, "state_sizes"):
            raise InvalidArgument(
                f"optimizer={type(optimizer).__name__}: the size of its state is not known before a step; give one of "
                "hydra_ext.optim, or its bytes for each trained parameter"
            )
        sizes = optimizer.state_sizes()
        state = sum(sum(sizes.get(parameter, ())) for parameter in trained)
    elif 0 <= optimizer < math.inf:
        state = round(optimizer * sum(parameter.numel() for parameter in trained))
    else:
        raise InvalidArgument(f"optimizer={optimizer}: give an optimizer, or bytes for each trained parameter")
    return _HeldByHost(
        weights=sum(tensor.nbytes for each in model.parameters() for tensor in inner_tensors(each).values()),
        trained=sum(parameter.nbytes for parameter in trained),
        state=state,
    )


def _update_seconds(held: _HeldByHost, card: Card | None) -> float:
    """A native optimizer is as fast as memory: it reads gradients, and reads and writes weights and state."""
    moved = held.trained + 2 * (held.trained + held.state)
    if not moved:
        return 0.0
    if card is not None:
        return moved / card.host_bytes_per_second
    return moved / speed_of_this_machine(torch.device("cpu"), torch.float32).bytes_per_second


def _homes(held: _HeldByHost, host_budget: int | str | None, disk: float | str | None, *, on_device: bool) -> Homes:
    limit = None if host_budget is None else parse_bytes(host_budget, named="host_budget")
    speed = 0.0 if disk is None else bytes_per_second(disk, named="disk")
    at_home = held.trained + held.state if on_device else 0
    return Homes(nbytes=held.all, host_budget=limit, disk=speed, on_device=at_home)
