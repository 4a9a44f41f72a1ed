"""Whether a model's training step fits a device, and how fast it is, before anything runs.

A dry run on fake tensors gives one microbatch's figures. The planner of activations then says what a step should keep,
move and compute again under a budget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from hydra_ext.errors import InvalidArgument
from hydra_ext.plan.steps.answer import answer
from hydra_ext.plan.steps.forecast import Plan
from hydra_ext.plan.steps.problem import StepProblem, StepSetting
from hydra_ext.policy import parse_bytes
from hydra_ext.profile.cards import USABLE, Card, card_named, link_of
from hydra_ext.profile.dry_run import dry_run

Example = TypeVar("Example")


def fit(
    model: nn.Module,
    example: Example,
    fn: Callable[[Example], Any],
    *,
    microbatches: int = 4,
    budget: int | str | None = None,
    device: Card | str | None = None,
    link: float | str | None = None,
    param_dtype: torch.dtype | None = None,
    update_seconds: float = 0.0,
) -> Plan:
    """Plans a training step from a dry run: no step is made, and no memory is taken.

    Seconds are from operations, bytes and the speeds of the device. A card's published speeds are peaks, so a real step
    takes longer; plans compare with each other.

    Args:
        model: Any module, also one on meta.
        example: One microbatch. The numbers in it are not read.
        fn: As in ``run.step``: returns the loss of ``example``, alone or with metrics.
        microbatches: Of a step.
        budget: Device bytes. None takes the card's memory, or without a card as much as all activations take.
        device: The name of a known card, such as ``"rtx4090-24"``, or a card's figures; None for this machine.
        link: Bytes a second between host and device, each way; None for the card's, or without a card for no limit.
        param_dtype: Dtype in which weights compute; by default the model's own.
        update_seconds: Of the optimizer's step, which runs behind the next forward.

    Raises:
        BudgetTooSmall: No plan fits. The error names the budget that would do, and the moment that needs it.
        NotOnFakeTensors: ``fn`` needs numbers.
        InvalidArgument: The card is unknown, or a number is not positive.
    """
    card = card_named(device) if isinstance(device, str) else device
    speed = link_of(link, card)
    setting = StepSetting(
        microbatches=_checked_count(microbatches),
        to_device=speed,
        to_host=speed,
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        update_seconds=update_seconds,
    )
    asked = None if budget is None else parse_bytes(budget)
    dtype = param_dtype or next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    profile = dry_run(model, example, fn, param_dtype=param_dtype, speed=None if card is None else card.speed(dtype))
    problem = StepProblem(profile, setting)
    if asked is None:
        asked = problem.ideal_bytes if card is None else int(card.memory_bytes * USABLE)
    if asked < problem.least_bytes:
        raise problem.too_small(asked)
    return answer(problem, asked)


def _checked_count(microbatches: int) -> int:
    if microbatches < 1:
        raise InvalidArgument(f"microbatches={microbatches}: a step has at least one")
    return microbatches
