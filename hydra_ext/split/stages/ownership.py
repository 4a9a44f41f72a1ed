"""Finds the parameters and buffers that a stage needs, and removes the others from the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hydra_ext.split.blocks import find_blocks
from hydra_ext.split.rehearsal.record import Rehearsal
from hydra_ext.split.stages.stand_ins import device_of, replace_tensors
from hydra_ext.split.stages.tensors import Absent, AbsentBuffer
from hydra_ext.split.state.listed import replace_listed


def parameters_of(rehearsal: Rehearsal, lo: int, hi: int, model: nn.Module) -> frozenset[str]:
    """Names of the parameters that the stage [lo, hi) needs.

    These are the parameters of its blocks, those that its blocks or the glue after them read, and those whose elements
    Python code reads. Unused parameters belong to the first stage.
    """
    of_event = _parameters_of_events(rehearsal, model)
    needed = rehearsal.everywhere.union(*of_event[lo:hi])
    if lo == 0:
        needed |= {name for name, _ in model.named_parameters()} - rehearsal.everywhere.union(*of_event)
    return needed


def _parameters_of_events(rehearsal: Rehearsal, model: nn.Module) -> list[frozenset[str]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    of_block = {
        block: frozenset(names[parameter] for parameter in model.get_submodule(block).parameters())
        for block in {event.name for event in rehearsal.events}
    }
    return [event.parameters | of_block[event.name] for event in rehearsal.events]


def shared_parameters(rehearsal: Rehearsal, cuts: Sequence[int], model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names of the parameters that several stages hold, each with its stages in order. Their gradients must be summed.

    Args:
        cuts: Boundaries between the stages, in order.
    """
    borders = [0, *cuts, len(rehearsal.events)]
    holders: dict[str, list[int]] = {}
    for stage in range(len(borders) - 1):
        for name in parameters_of(rehearsal, borders[stage], borders[stage + 1], model):
            holders.setdefault(name, []).append(stage)
    return {name: tuple(stages) for name, stages in sorted(holders.items()) if len(stages) > 1}


def keep_own_part(
    model: nn.Module,
    rehearsal: Rehearsal,
    stages: Sequence[tuple[int, int]],
    *,
    device: torch.device | None = None,
) -> frozenset[str]:
    """Replaces the parameters and buffers that none of these stages [lo, hi) needs by stand-ins.

    A stand-in takes one element of memory on the compute device.

    Returns:
        The names of the parameters that are kept.
    """
    device = device or device_of(model)
    kept = frozenset().union(*(parameters_of(rehearsal, lo, hi, model) for lo, hi in stages))
    kept_tensors = {parameter for name, parameter in model.named_parameters() if name in kept}
    buffers = frozenset().union(*(buffers_of(rehearsal, lo, hi, model) for lo, hi in stages))
    kept_tensors |= {buffer for name, buffer in model.named_buffers() if name in buffers}  # type: ignore[misc]

    def new(tensor: Tensor) -> Tensor | None:
        if tensor in kept_tensors or isinstance(tensor, (Absent, AbsentBuffer)):
            return None
        return (Absent if isinstance(tensor, nn.Parameter) else AbsentBuffer).like(tensor, device)

    replaced = replace_tensors(model, new)
    replace_listed(
        model,
        {tensor: there for module, name, tensor in replaced if (there := module._parameters.get(name)) is not None},
    )
    return kept


def glue_parameters(model: nn.Module, blocks: Sequence[str] | None = None) -> frozenset[str]:
    """Names of the parameters outside all blocks. A rehearsal needs their real numbers."""
    inside = {parameter for block in find_blocks(model, blocks).values() for parameter in block.parameters()}
    return frozenset(name for name, parameter in model.named_parameters() if parameter not in inside)


def buffers_of(rehearsal: Rehearsal, lo: int, hi: int, model: nn.Module) -> frozenset[str]:
    """Names of the buffers that the stage needs: those outside blocks, those of its blocks, and others that it reads.

    Buffers of blocks that are never called belong to the first stage.
    """
    own = tuple(event.name + "." for event in rehearsal.events[lo:hi])
    if lo == 0:
        called = {event.name for event in rehearsal.events}
        own += tuple(name + "." for name in rehearsal.blocks if name not in called)
    blocks = tuple(name + "." for name in rehearsal.blocks)
    read = frozenset().union(*(event.buffers for event in rehearsal.events[lo:hi]))
    return frozenset(
        name for name, _ in model.named_buffers() if name in read or name.startswith(own) or not name.startswith(blocks)
    )


def buffer_owners(rehearsal: Rehearsal, cuts: Sequence[int], model: nn.Module) -> dict[str, int]:
    """The stage whose copy of each buffer is the right one, by the buffer's name.

    It is the stage that writes to the buffer, else the last one that replaces it, else the first one that reads it. A
    buffer that no event uses belongs to the first stage that calls its block, else to the first stage.
    """
    owners: dict[str, int] = {}
    stage_of = [sum(cut <= number for cut in cuts) for number in range(len(rehearsal.events))]
    numbered = list(enumerate(rehearsal.events))
    for names in ("writes", "sets", "buffers"):
        for number, event in reversed(numbered) if names == "sets" else numbered:
            for name in getattr(event, names):
                owners.setdefault(name, stage_of[number])
    blocks = {f"{event.name}.": stage_of[number] for number, event in reversed(list(enumerate(rehearsal.events)))}
    for name, _ in model.named_buffers():
        holder = next((stage for block, stage in blocks.items() if name.startswith(block)), 0)
        owners.setdefault(name, holder)
    return {name: owners[name] for name, _ in model.named_buffers()}


def changed_elsewhere(
    rehearsal: Rehearsal, cuts: Sequence[int], model: nn.Module, stages: Sequence[int]
) -> frozenset[str]:
    """Names of the buffers that the forward changes, and of which none of these stages has the right copy."""
    owners = buffer_owners(rehearsal, cuts, model)
    changed = frozenset().union(*(event.writes | event.sets for event in rehearsal.events))
    return frozenset(name for name in changed & owners.keys() if owners[name] not in stages)
