"""Moves a model's blocks into the arena, one after the other. Blocks on meta are filled just before they move.

For a model made by :func:`hydra_ext.materialize`, the host holds the blocks that have moved in and the result of one
:func:`~hydra_ext.construction.fill`. A fill makes one block that is read from files, or a group of blocks that the
constructor draws together (:func:`~hydra_ext.construction.in_groups`). The host holds the block that is moving twice.
Freed memory is returned to the system at once, since the memory that the C library caches would add to this.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hydra_ext import _C
from hydra_ext.blocks import Block, Layout
from hydra_ext.construction import check_fillable, fill, give_back_freed, has_source, in_groups
from hydra_ext.errors import InvalidOptimizer, UnsupportedModel
from hydra_ext.runtime.placement.spilling import Spilling
from hydra_ext.runtime.replicas import Replicas

_SENT_BYTES = 2**26  # of a table are sent to the other ranks at a time: the host holds them twice


def why_not_fillable(parameter: torch.Tensor) -> str:
    """Why a parameter on meta cannot be given memory, or could not be moved afterwards; empty if it can."""
    if not has_source(parameter):
        return (
            "is on the meta device, and has no numbers: build the model by hydra_ext.materialize(build), and offload "
            "what it returns, not a copy"
        )
    if torch.empty_like(parameter).stride() != parameter.stride():
        return "has strides that overlap or leave gaps; make it .contiguous() in the constructor"
    return ""


def check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Checks that :func:`move_in` can fill the parameters on meta, and that no optimizer state is on meta.

    Raises:
        ModelChanged, UnsupportedModel, WeightsError: as :func:`~hydra_ext.construction.fill`.
        InvalidOptimizer: a tensor of the optimizer's state is on meta.
    """
    lacking = {name: parameter for name, parameter in model.named_parameters() if parameter.is_meta}
    for name, parameter in lacking.items():
        if reason := why_not_fillable(parameter):
            raise UnsupportedModel(f"the parameter '{name}' {reason}")
    if lacking:
        check_fillable(model)
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        lost = [key for key, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]
        if lost:
            raise InvalidOptimizer(
                f"the {type(optimizer).__name__} has '{lost[0]}' of '{name}' on meta, without numbers: the state was "
                "made, or loaded, when the parameter had no memory. Load it inside the context, or use an optimizer of "
                "hydra_ext.optim, which can load it at any time"
            )


def move_in(
    core: _C.PagedModel,
    model: nn.Module,
    layout: Layout,
    replicas: Replicas | None,
    spilling: Spilling | None,
) -> None:
    """Adds all blocks with their numbers to the core, in order; with several ranks, with rank 0's numbers.

    Tables get rank 0's numbers, too. Weights that belong on the disk are moved there before the next block is added.

    Raises:
        WeightsError, BuildDiffers: parameters on meta could not be filled. Parameters filled before have their correct
            numbers and keep them; the others stay on meta.
        RankFailed: another rank has failed.
    """
    blocks = layout.blocks
    if spilling is not None:
        _move_tables_in(model, layout, replicas, spilling)
    groups = _groups(model, blocks, None if spilling is None else spilling.room_to_move_in)
    lacking = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if lacking and not blocks:
        _together(replicas, model, lacking)
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
    if replicas is not None and spilling is None:
        for table in layout.tables:
            _follow_first(replicas, table.weight)


def _move_tables_in(model: nn.Module, layout: Layout, replicas: Replicas | None, spilling: Spilling) -> None:
    """Fills tables and moves them to their home, one after the other."""
    for table in layout.tables:
        if table.weight.is_meta:
            _together(replicas, model, [table.name])
        if replicas is not None:
            _follow_first(replicas, table.weight)
        spilling.table_filled(table.weight)
        give_back_freed()


def _follow_first(replicas: Replicas, weight: nn.Parameter) -> None:
    """Gives a table rank 0's numbers."""
    rows = max(1, _SENT_BYTES * len(weight) // weight.nbytes)
    replicas.follow_first(torch.split(weight.detach(), rows))


def _groups(model: nn.Module, blocks: Sequence[Block], room: int | None) -> list[list[str]]:
    """Names of the parameters to fill before each block is added; empty if all parameters have memory."""
    lacking = {name: parameter for name, parameter in model.named_parameters() if parameter.is_meta}
    if not lacking:
        return []
    groups = in_groups(
        model, [[name for name, _ in block.parameters if name in lacking] for block in blocks], room=room
    )
    grouped = {name for group in groups for name in group}
    others = [name for name in lacking if name not in grouped]  # without elements, or tables: they are in no block
    return [[*others, *groups[0]], *groups[1:]] if groups else []


def _together(replicas: Replicas | None, model: nn.Module, names: Sequence[str]) -> None:
    if replicas is None:
        fill(model, names)
    else:
        replicas.together(lambda: fill(model, names))


def _add(core: _C.PagedModel, block: Block) -> None:
    """Moves the block's numbers to the arena. On return no other copy exists: the filled memory has been freed."""
    core.add_block(block.name, list(block.parameters))
