"""What several ranks hold of one model begins with the same numbers, whatever each was seeded with."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hydra_ext.pipeline.groups import Groups
from hydra_ext.pipeline.parts import Parts
from hydra_ext.pipeline.split.stand_ins import is_absent
from hydra_ext.pipeline.topology import Topology
from hydra_ext.schedule import Schedule

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
    """What several stages hold gets the first of these stages' numbers, and every replica the first replica's.

    Args:
        line: ranks of this replica, if there are several.
        copies: ranks with this place in every replica, if there are several.

    Raises:
        RankFailed: a rank has ended.
    """
    if line is not None and topology.replica == 0:
        for held in parts.common:
            _take_first(held, schedule, topology, line, groups)
    if copies is not None:
        for part in parts.own:
            buffers = [buffer for module in part.modules for buffer in module.buffers() if not is_absent(buffer)]
            others = [tensor for held in parts.common if (tensor := held.get(part.stage)) is not None]
            for tensor in dict.fromkeys([*(parameter for _, parameter in part.parameters), *buffers, *others]):
                value = tensor.contiguous()
                groups.broadcast(value, copies)
                tensor.copy_(value)


def _take_first(
    held: dict[int, Tensor | None], schedule: Schedule, topology: Topology, line: dist.ProcessGroup, groups: Groups
) -> None:
    """One after another, so that all ranks come to their sends and receives in the same order."""
    places = _places(sorted(held), schedule)
    own = next((tensor for _, tensor in sorted(held.items()) if tensor is not None), None)
    if own is None or own.numel() == 0:
        return
    if topology.place == places[0]:
        for place in places[1:]:
            groups.send(_bytes_of(own), place, line)
        return
    here = _bytes_of(own)
    first = torch.empty_like(here)
    groups.receive(first, places[0], line)
    if not torch.equal(here, first):  # also where they are no numbers; writing to no purpose may not be possible
        logger.info("a tensor of shape %s, that stages %s hold, is as in the first", tuple(own.shape), sorted(held))
        own.copy_(first.view(own.dtype).view(own.shape))


def _places(stages: Sequence[int], schedule: Schedule) -> list[int]:
    return list(dict.fromkeys(schedule.stage_rank(stage) for stage in stages))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
