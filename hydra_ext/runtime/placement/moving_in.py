"""A model's blocks move into the arena, one after the other; those on meta get their numbers just before.

Of a model that :func:`hydra_ext.materialize` has made, the host so holds the homes of the blocks that have moved in,
and beside them what one :func:`~hydra_ext.construction.fill` has made for blocks whose turn comes next: a block that is
read from files, or a group of blocks that the constructor has drawn (:func:`~hydra_ext.construction.in_groups`). The
block that is moving is there twice. What is freed goes back to the system at once, or what the C library keeps of it
would come on top.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hydra_ext import _C
from hydra_ext.blocks import Block
from hydra_ext.construction import check_fillable, fill, give_back_freed, in_groups, was_materialized
from hydra_ext.errors import InvalidOptimizer, UnsupportedModel
from hydra_ext.runtime.placement.spilling import Spilling
from hydra_ext.runtime.replicas import Replicas


def why_not_fillable(model: nn.Module, parameter: torch.Tensor) -> str:
    """Why a parameter on meta cannot get memory, or could not be moved then; empty if it can."""
    if not was_materialized(model):
        return (
            "is on the meta device, and has no numbers: build the model by hydra_ext.materialize(build), and offload "
            "what it returns, not a copy, a part or a module around it"
        )
    if torch.empty_like(parameter).stride() != parameter.stride():
        return "has strides that overlap or leave gaps; make it .contiguous() in the constructor"
    return ""


def check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """That :func:`move_in` will find what parameters on meta get, and that the optimizer has not lost anything to meta.

    Raises:
        ModelChanged, UnsupportedModel, WeightsError: as :func:`~hydra_ext.construction.fill`.
        InvalidOptimizer: its state is on meta.
    """
    lacking = {name: parameter for name, parameter in model.named_parameters() if parameter.is_meta}
    for name, parameter in lacking.items():
        if reason := why_not_fillable(model, parameter):
            raise UnsupportedModel(f"the parameter '{name}' {reason}")
    if lacking:
        check_fillable(model)
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        lost = [key for key, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]
        if lost:
            raise InvalidOptimizer(
                f"the {type(optimizer).__name__} has '{lost[0]}' of '{name}' on meta, without numbers: it was made, or "
                "loaded, when the parameter had no memory. Load it inside the context, or take an optimizer of "
                "hydra_ext.optim, which loads it at any time"
            )


def move_in(
    core: _C.PagedModel,
    model: nn.Module,
    blocks: Sequence[Block],
    replicas: Replicas | None,
    spilling: Spilling | None,
) -> None:
    """Gives the core all blocks, in their order, each with its numbers: with several ranks those of rank 0. What is to
    be on the disk goes there before the next block comes.

    Raises:
        WeightsError, BuildDiffers: of parameters on meta. What has got memory until then has its right numbers, and
            keeps both; the others are on meta.
        RankFailed: this happened on another rank.
    """
    groups = _groups(model, blocks, None if spilling is None else spilling.room_to_move_in)
    for index, block in enumerate(blocks):
        if groups:
            _together(replicas, model, groups[index])
        if replicas is not None:
            replicas.follow_first([parameter for _, parameter in block.parameters])
        _add(core, block)
        if spilling is not None:
            spilling.block_added(index)
        if groups:
            give_back_freed()


def _groups(model: nn.Module, blocks: Sequence[Block], room: int | None) -> list[list[str]]:
    """What is to be filled before each block; nothing if all parameters have memory."""
    lacking = {name: parameter for name, parameter in model.named_parameters() if parameter.is_meta}
    if not lacking:
        return []
    groups = in_groups(model, [[name for name, _ in block.parameters] for block in blocks], room=room)
    empty = [name for name, parameter in lacking.items() if parameter.numel() == 0]  # in no block
    return [[*empty, *groups[0]], *groups[1:]] if groups else []


def _together(replicas: Replicas | None, model: nn.Module, names: Sequence[str]) -> None:
    if replicas is None:
        fill(model, names)
    else:
        replicas.together(lambda: fill(model, names))


def _add(core: _C.PagedModel, block: Block) -> None:
    """The block's numbers move to the arena. On return they are there alone: what was filled is free again."""
    core.add_block(block.name, list(block.parameters))
