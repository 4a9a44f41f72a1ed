"""Splits a plain module: the ranks rehearse it, agree on the cuts, and each keeps its own stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.construction import fill
from hydra_ext.errors import InvalidArgument, SplitError, UnsupportedModel
from hydra_ext.pipeline.ranks.messages import fingerprint
from hydra_ext.pipeline.ranks.topology import Topology
from hydra_ext.pipeline.ranks.watch import Watch
from hydra_ext.pipeline.stages.parts import Part, Parts
from hydra_ext.plan import partition_chain
from hydra_ext.schedule import Schedule
from hydra_ext.schedule.sharing import refuse_late_sums
from hydra_ext.split import (
    Rehearsal,
    SplitStage,
    buffers_of,
    changed_elsewhere,
    glue_parameters,
    keep_own_part,
    parameters_of,
    rehearse,
    shared_parameters,
    time_events,
)
from hydra_ext.split.chains import chain_of
from hydra_ext.split.stages.side_by_side import SideBySide, SideBySideStage
from hydra_ext.split.stages.stand_ins import replace_tensors
from hydra_ext.split.stages.state_dicts import refuse_state_dicts
from hydra_ext.split.state.carried import attribute_tensors

_BYTES_PER_SECOND = 1e9  # speed of hops, for choosing cuts: a few bytes justify only a little imbalance


def split_parts(
    model: nn.Module,
    fn: Callable[[Any], Any],
    microbatch: Any,
    *,
    schedule: Schedule,
    topology: Topology,
    watch: Watch,
    device: torch.device,
    home: torch.device,
    cuts: Sequence[str | int] | None,
    seed: int,
) -> Parts:
    """Splits a model into stages and keeps this rank's; its other parameters lose their memory.

    All ranks have to call it, with the same microbatch. Chosen cuts depend on the first rank's times.

    Args:
        model: A whole model, or one on meta. Of the latter only this rank's part and the glue's parameters are built.
        device, home: Where this rank computes, and where its parameters are to be.
        cuts: Where stages after the first begin: names of blocks, or numbers of events. By default they are chosen.

    Raises:
        InvalidArgument: ``cuts`` has the wrong length or order, or names no block.
        SplitError: The model cannot be cut there, or not often enough, or the ranks' rehearsals differ.
        PlanError: There are fewer blocks than stages.
        UnsupportedModel: Stages on one rank share a parameter, or the forward writes to one between blocks.
    """
    unbuilt = made_ready(model, device)
    rehearsal = rehearse(model, fn, microbatch, seed=seed, device=device)
    compare(rehearsal.digest, "took another path through the model than rank 0 in its rehearsal", watch)
    if cuts is None:
        seconds = timed(lambda: time_events(model, fn, microbatch, rehearsal, seed=seed, device=device), watch)
        borders = [0, *_chosen(model, rehearsal, schedule.stages, seconds), len(rehearsal.events)]
    else:
        borders = given_borders(rehearsal, schedule.stages, cuts)
    division = _divide(model, rehearsal, borders)
    several = _held_by_several(model, rehearsal, borders, division)
    shapes = {
        name: (stages, tensor.shape) for name, tensor in _named_tensors(model).items() if (stages := several.get(name))
    }
    compare(repr(sorted(shapes.items())), "holds other tensors on its modules than rank 0", watch)
    own = schedule.stages_of(topology.place)
    _refuse_twice_here(division, rehearsal, own)
    refuse_late_sums(division.trained_together(), schedule)
    if unbuilt:
        fill(model, {name for stage in own for name in division.held[stage]})
    keep_own_part(model, rehearsal, [(borders[stage], borders[stage + 1]) for stage in own], device=device)
    model.to(home)
    refuse_state_dicts(model, whole=len(own) == schedule.stages)
    parts = _own_parts(model, rehearsal, borders, division, own, device)
    tensors = _named_tensors(model)
    common = tuple(
        {stage: tensors[name] if stage in own else None for stage in stages} for name, stages in several.items()
    )
    elsewhere = changed_elsewhere(rehearsal, borders[1:-1], model, own)
    return Parts(parts, division.shared(), division.orders(), rehearsal, common, elsewhere, model)


def made_ready(model: nn.Module, device: torch.device) -> bool:
    """Builds what a rehearsal needs of a model on meta; returns whether it is one."""
    unbuilt = any(parameter.is_meta for parameter in model.parameters())
    if unbuilt:
        fill(model, glue_parameters(model), device=device)
        _move_buffers(model, device)
    return unbuilt


def _held_by_several(
    model: nn.Module, rehearsal: Rehearsal, borders: Sequence[int], division: _Division
) -> dict[str, list[int]]:
    """Tensors of modules that several stages need, by name, with these stages; the same on every rank."""
    holders = {name: set(stages) for name, stages in division.holders.items()}
    attributes = {name for name, _ in attribute_tensors(model)}
    for stage, (lo, hi) in enumerate(pairwise(borders)):
        read = frozenset().union(*(event.buffers for event in rehearsal.events[lo:hi]))
        for name in buffers_of(rehearsal, lo, hi, model) | (read & attributes):
            holders.setdefault(name, set()).add(stage)
    return {name: sorted(stages) for name, stages in sorted(holders.items()) if len(stages) > 1}


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Moves the buffers of a model that is not built yet: blocks compute where the microbatches are."""
    replace_tensors(model, lambda tensor: None if isinstance(tensor, nn.Parameter) else tensor.to(device))


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(attribute_tensors(model)), **dict(model.named_buffers()), **dict(model.named_parameters())}


def _own_parts(
    model: nn.Module,
    rehearsal: Rehearsal,
    borders: Sequence[int],
    division: _Division,
    own: Sequence[int],
    device: torch.device,
) -> tuple[Part, ...]:
    parameters = dict(model.named_parameters())
    states = SideBySide(model, own, rehearsal.rewritten) if len(own) > 1 else None
    parts = []
    for stage in own:
        program = SplitStage(model, rehearsal, borders[stage], borders[stage + 1], device=device)
        named = tuple((name, parameters[name]) for name in division.held[stage])
        around = None if states is None else partial(SideBySideStage, inner=program, stage=stage, states=states)
        parts.append(Part(stage, program, (model,), named, around))
    return tuple(parts)


@dataclass(frozen=True)
class _Division:
    """The stages' parameters by name, the same on every rank.

    Attributes:
        names: Names of all parameters, with their places in the model.
        held: Each stage's parameters, in the model's order.
        trained: Each stage's trained parameters, likewise.
        holders: Parameters that several stages hold, with these stages.
    """

    names: dict[str, int]
    held: list[list[str]]
    trained: list[list[str]]
    holders: dict[str, tuple[int, ...]]

    def orders(self) -> dict[int, tuple[int, ...]]:
        """See :class:`~hydra_ext.pipeline.stages.parts.Parts`."""
        return {
            stage: tuple(self.names[n] if self.holders.get(n, (stage,))[0] == stage else -1 for n in of_stage)
            for stage, of_stage in enumerate(self.trained)
        }

    def shared(self) -> tuple[dict[int, int | None], ...]:
        """See :class:`~hydra_ext.pipeline.stages.parts.Parts`."""
        several = sorted(self.holders, key=self.names.__getitem__)
        return tuple(
            {stage: self.trained[stage].index(name) for stage in self.holders[name]}
            for name in several
            if name in self.trained[self.holders[name][0]]
        )

    def trained_together(self) -> list[tuple[str, tuple[int, ...]]]:
        """Parameters that several stages train, with these stages."""
        return [(f"'{name}'", stages) for name, stages in self.holders.items() if name in self.trained[stages[0]]]


def _divide(model: nn.Module, rehearsal: Rehearsal, borders: Sequence[int]) -> _Division:
    parameters = dict(model.named_parameters())
    names = {name: number for number, name in enumerate(parameters)}
    held = [sorted(parameters_of(rehearsal, lo, hi, model), key=names.__getitem__) for lo, hi in pairwise(borders)]
    trained = [[name for name in of_stage if parameters[name].requires_grad] for of_stage in held]
    return _Division(names, held, trained, shared_parameters(rehearsal, borders[1:-1], model))


def compare(found_here: str, difference: str, watch: Watch, *, where: str | None = None) -> None:
    """Compares a text with the other ranks'.

    Args:
        difference: What a rank with another text did, as a predicate for the message.
        where: The meeting's name, which no other meeting has.

    Raises:
        SplitError: Another rank's text differs.
    """
    found = watch.meet(where or f"to compare what {difference.split()[0]}", fingerprint(found_here))
    other = next((rank for rank, each in enumerate(found) if each != found[0]), None)
    if other is not None:
        raise SplitError(f"rank {other} {difference}: give all ranks the same model and the same microbatches")


def timed(measure: Callable[[], list[float]], watch: Watch, *, where: str = "for the cuts") -> list[float]:
    """The first rank's times, so that all ranks choose alike.

    The other ranks measure, too, so that ``fn`` is called equally often on all ranks. They do so later, in order not to
    disturb the first rank.
    """
    seconds: list[float] = watch.meet(f"for times {where}", measure() if watch.rank == 0 else [])[0]
    if watch.rank != 0:
        measure()
    watch.meet(
        f"after the times {where}"
    )  # every rank finds refused cuts itself: none may raise while another one measures
    return seconds


def given_borders(rehearsal: Rehearsal, stages: int, cuts: Sequence[str | int]) -> list[int]:
    """The borders of the stages that begin at these cuts.

    Raises:
        InvalidArgument: There are too few or too many cuts, a name is no block, or they are not in order.
        SplitError: The model cannot be cut there.
    """
    count = len(rehearsal.events)
    if len(cuts) != stages - 1:
        raise InvalidArgument(f"cuts={list(cuts)!r}: {stages} stages have {stages - 1} cuts")
    blocks = [event.name for event in rehearsal.events]
    found = [_event_named(cut, blocks) if isinstance(cut, str) else cut for cut in cuts]
    borders = [0, *found, count]
    if any(low >= high for low, high in pairwise(borders)):
        raise InvalidArgument(f"cuts={list(cuts)!r} are events {found} of {count}: give them in the forward's order")
    for cut in found:
        if rehearsal.boundaries[cut].reasons:
            raise SplitError(f"no cut can be made before '{blocks[cut]}': {rehearsal.boundaries[cut].reasons[0]}")
    return borders


def _event_named(name: str, blocks: Sequence[str]) -> int:
    """The first event of the block with this name, or of a block in the module with this name."""
    for index, block in enumerate(blocks):
        if f"{block}.".startswith(f"{name}."):
            return index
    raise InvalidArgument(f"cuts names '{name}', which is no block: the blocks are {', '.join(blocks)}")


def _chosen(model: nn.Module, rehearsal: Rehearsal, stages: int, seconds: Sequence[float]) -> tuple[int, ...]:
    """The cuts with which the slowest stage is fastest."""
    _refuse_too_few(rehearsal, stages)
    chain = chain_of(model, rehearsal, seconds)
    partition = partition_chain(
        chain.events, chain.boundaries, stages=stages, shared=chain.shared, bandwidth=_BYTES_PER_SECOND
    )
    return partition.cuts


def _refuse_too_few(rehearsal: Rehearsal, stages: int) -> None:
    """Refuses if the model rules out too many cuts. If there are too few blocks the partition raises."""
    refused = next((b for b, boundary in enumerate(rehearsal.boundaries) if boundary.reasons), None)
    possible = rehearsal.possible_cuts
    if refused is not None and len(possible) < stages - 1 < len(rehearsal.events):
        names = [event.name for event in rehearsal.events]
        where = ", ".join(f"'{names[b]}'" for b in possible) or "no block"
        raise SplitError(
            f"{stages} stages need {stages - 1} cuts, and they can be made before {where}: none before "
            f"'{names[refused]}', for instance, since {rehearsal.boundaries[refused].reasons[0]}"
        )


def _refuse_twice_here(division: _Division, rehearsal: Rehearsal, own: Sequence[int]) -> None:
    """Refuses a parameter of several stages of one rank.

    The module has one place for it, and each of the stages would put its own versions there.
    """
    for name, stages in division.holders.items():
        here = sorted(set(own).intersection(stages))
        if len(here) > 1:
            raise UnsupportedModel(
                f"'{name}' is used by stages {here}, which are on one rank: use other cuts=, or as many ranks as stages"
            )
    written = sorted(rehearsal.rewritten & division.names.keys())
    if written and len(own) > 1:
        raise UnsupportedModel(
            f"the forward writes to '{written[0]}' between blocks, as each of the stages {sorted(own)} of one rank "
            "would: write to it outside of fn, or use as many ranks as stages"
        )
