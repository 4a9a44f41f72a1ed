"""Gives tensors that several ranks hold the same values at the start, even if the ranks have different seeds."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hydra_ext.errors import UnsupportedModel
from hydra_ext.pipeline.ranks import messages
from hydra_ext.pipeline.ranks.groups import Groups
from hydra_ext.pipeline.ranks.topology import Topology
from hydra_ext.pipeline.stages.parts import Part, Parts
from hydra_ext.schedule import Schedule
from hydra_ext.split.stages.stand_ins import is_absent

logger = logging.getLogger(__name__)


@torch.no_grad()
def begin_alike(
    parts: Parts,
    schedule: Schedule,
    topology: Topology,
    line: dist.ProcessGroup | None,
    copies: dist.ProcessGroup | None,
    groups: Groups,
) -> None:
    """Copies each tensor that several stages hold from the first of them, and the first replica to all others.

    All ranks have to call it.

    Args:
        line: The ranks of this replica; None if there is only one.
        copies: The ranks with this place in every replica; None without replicas.

    Raises:
        RankFailed: A rank has ended.
        UnsupportedModel: A tensor has to change and cannot be written to.
    """
    if line is not None and topology.replica == 0:
        for held in parts.common:
            _take_first(held, schedule, topology, line, groups)
    if copies is not None:
        for part in parts.own:
            for tensor, name in _held(part, parts).items():
                here = tensor.contiguous()
                value = here if topology.replica == 0 else torch.empty_like(here)
                groups.broadcast(value, copies)
                _set(tensor, here, value, name)


def _held(part: Part, parts: Parts) -> dict[Tensor, str]:
    """The stage's tensors, its own and those in common with other stages, and their names for messages."""
    named: list[tuple[Tensor, str]] = [(parameter, name) for name, parameter in part.parameters]
    for module in part.modules:
        named += [(buffer, name) for name, buffer in module.named_buffers() if not is_absent(buffer)]
    names: dict[Tensor, str] = {}
    for tensor, name in named:
        names.setdefault(tensor, f"'{name}' of stage {part.stage}")
    for held in parts.common:
        common = held.get(part.stage)
        if common is not None:
            names.setdefault(common, _several(common, held))
    return names


def _several(tensor: Tensor, stages: Collection[int]) -> str:
    return f"a tensor of shape {tuple(tensor.shape)}, that stages {sorted(stages)} hold,"


def _take_first(
    held: dict[int, Tensor | None], schedule: Schedule, topology: Topology, line: dist.ProcessGroup, groups: Groups
) -> None:
    """Sends a tensor from the first stage that holds it to the others, which write it.

    Sends are made one after another, so that all ranks come to their sends and receives in the same order.
    """
    places = _places(sorted(held), schedule)
    own = next((tensor for _, tensor in sorted(held.items()) if tensor is not None), None)
    if own is None or own.numel() == 0:
        return
    here = own.detach().cpu().contiguous()
    if topology.place == places[0]:
        for place in places[1:]:
            groups.send(here, place, line)
        return
    first = torch.empty_like(here)
    groups.receive(first, places[0], line)
    if _set(own, here, first, _several(own, held)):
        logger.info("%s has got the values of the first of them", _several(own, held))


def _set(tensor: Tensor, here: Tensor, value: Tensor, name: str) -> bool:
    """Writes the value if it differs. An equal tensor may be one that cannot be written to.

    Args:
        here: The tensor's values, contiguous.

    Returns:
        Whether the value differed.

    Raises:
        UnsupportedModel: The tensor cannot be written to.
    """
    if torch.equal(messages.as_bytes(here), messages.as_bytes(value)):  # bytes: NaNs may be equal, too
        return False
    try:
        tensor.copy_(value)
    except RuntimeError as error:
        raise UnsupportedModel(
            f"{name} has other numbers here than on the first rank that holds it, and cannot be written to ({error}): "
            "give it the same numbers on all ranks, or memory of its own (clone(), contiguous())"
        ) from error
    return True


def _places(stages: Sequence[int], schedule: Schedule) -> list[int]:
    return list(dict.fromkeys(schedule.stage_rank(stage) for stage in stages))
