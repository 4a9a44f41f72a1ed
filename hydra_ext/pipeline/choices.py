"""Checks the arguments of a pipeline before anything changes."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import nn

from hydra_ext.errors import InvalidArgument
from hydra_ext.pipeline.ranks.topology import Topology
from hydra_ext.pipeline.stages.parts import StageModule
from hydra_ext.pipeline.stages.tier import TierOptions
from hydra_ext.policy import Checks, SimulatedDevice, parse_bytes
from hydra_ext.runtime.placement import devices
from hydra_ext.schedule import Schedule


def stage_modules(
    model: object, optimizer: object, stages: Sequence[StageModule] | int | None, cuts: object
) -> list[StageModule]:
    """The stages that were given as modules; empty for a model.

    Raises:
        InvalidArgument: The arguments do not say what to train, or with which optimizer.
    """
    if not callable(optimizer):
        raise InvalidArgument(
            f"optimizer={optimizer!r}: give a function that makes an optimizer for the parameters it gets, such as "
            "lambda params: hydra_ext.optim.AdamW(params, lr=3e-4)"
        )
    if model is None:
        modules = [] if isinstance(stages, int) or stages is None else list(stages)
        if not modules:
            raise InvalidArgument("there is nothing to train: give a model, or its stages=[...] as modules")
        if cuts is not None:
            raise InvalidArgument(
                f"cuts={cuts!r} cannot cut stages that are given as modules: give a model, or leave cuts= out"
            )
        return modules
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model is a {type(model).__name__}: give a torch.nn.Module, or None and stages=[...]")
    whole = stages is None or (isinstance(stages, int) and not isinstance(stages, bool) and stages >= 1)
    if not whole:
        raise InvalidArgument(
            f"stages={stages!r} with a model: give the number of stages, or None as the model and stages=[...]"
        )
    return []


def check_schedule(schedule: Schedule, stages: int, topology: Topology) -> None:
    """
    Raises:
        InvalidArgument: The schedule is for other numbers of stages or ranks.
        InvalidSchedule: A user's own schedule is not valid.
    """
    if (schedule.stages, schedule.ranks) != (stages, topology.places):
        raise InvalidArgument(
            f"the schedule is for {schedule.stages} stages on {schedule.ranks} ranks, and there are {stages} stages on "
            f"{topology.places} ranks: make it for these numbers"
        )
    if schedule.kind is None:
        schedule.verify()


def tier_options(
    budget: int | str | None, device: torch.device | str | SimulatedDevice | None, checks: Checks | None
) -> TierOptions | None:
    """The options of a tier; None without a budget.

    Raises:
        InvalidArgument: A simulated device comes without a budget.
        InvalidBudget: The budget is not a size.
    """
    if budget is None:
        if isinstance(device, SimulatedDevice):
            raise InvalidArgument("device=SimulatedDevice(...) has as much memory as its budget=: give a budget=")
        return None
    if device is None and torch.cuda.is_available():
        device = choose_device(None)
    return TierOptions(parse_bytes(budget), devices.choose(device), checks or Checks())


def choose_device(device: torch.device | str | SimulatedDevice | None) -> torch.device:
    """Where this rank computes: the given device, else this rank's GPU if there is one, else the CPU.

    A GPU has its index: the current one is another in the threads of links.
    """
    if isinstance(device, SimulatedDevice):
        return torch.device("cpu")
    if device is not None:
        given = torch.device(device)
        index: int | None = given.index
        is_current = given.type == "cuda" and index is None and torch.cuda.is_available()
        return torch.device("cuda", torch.cuda.current_device()) if is_current else given
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")
