"""From a plain module to this rank's stages: rehearse, agree on the cuts, keep only the own part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from hydra_ext.construction import fill
from hydra_ext.errors import InvalidArgument, SplitError, StateError, UnsupportedModel
from hydra_ext.pipeline.messages import fingerprint
from hydra_ext.pipeline.parts import Part, Parts
from hydra_ext.pipeline.sharing import refuse_late_sums
from hydra_ext.pipeline.split import (
    Rehearsal,
    SplitStage,
    glue_parameters,
    keep_own_part,
    parameters_of,
    rehearse,
    shared_parameters,
    time_events,
)
from hydra_ext.pipeline.topology import Topology
from hydra_ext.pipeline.watch import Watch
from hydra_ext.plan import Boundary, Event, SharedParameters, partition_chain
from hydra_ext.schedule import Schedule

_BACKWARD = 2.0  # times its forward: two products for each of the forward's
_BYTES_PER_SECOND = 1e9  # between two ranks, for choosing cuts: few bytes are worth little imbalance


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
    """This rank's stages of a model; its other parameters lose their memory.

    All ranks make one rehearsal each, with the same microbatch, and take the cuts that the first rank's times suggest.

    Args:
        model: whole, or on meta as :func:`hydra_ext.construction.materialize` makes it: then only the own part is
            ever built.
        device: where this rank computes.
        home: where its parameters are to be.
        cuts: where stages after the first begin: names of blocks, or numbers of events; chosen unless given.

    Raises:
        SplitError: the model cannot be cut so, or not often enough, or ranks found different things.
        PlanError: there are fewer blocks than stages.
    """
    unbuilt = any(parameter.is_meta for parameter in model.parameters())
    if unbuilt:
        fill(model, glue_parameters(model))
    rehearsal = rehearse(model, fn, microbatch, seed=seed)
    _compare(rehearsal, watch)
    if cuts is None:
        seconds = time_events(model, fn, microbatch, rehearsal, seed=seed) if topology.rank == 0 else []
        seconds = watch.meet("for the cuts", seconds)[0]  # so that all ranks choose alike
        borders = [0, *_chosen(model, rehearsal, schedule.stages, seconds), len(rehearsal.events)]
    else:
        borders = _given(rehearsal, schedule.stages, cuts)
    division = _divide(model, rehearsal, borders)
    own = schedule.stages_of(topology.place)
    _refuse_twice_here(division, own)
    refuse_late_sums(division.trained_together(), schedule)
    if unbuilt:
        fill(model, {name for stage in own for name in division.held[stage]})
    keep_own_part(model, rehearsal, [(borders[stage], borders[stage + 1]) for stage in own], device=device)
    model.to(home)
    model.register_state_dict_pre_hook(_refuse_state_dict)  # type: ignore[no-untyped-call]
    parameters = dict(model.named_parameters())
    parts = [
        Part(
            stage,
            SplitStage(model, rehearsal, borders[stage], borders[stage + 1], device=device),
            (model,),
            tuple((name, parameters[name]) for name in division.held[stage]),
        )
        for stage in own
    ]
    return Parts(tuple(parts), division.shared(), division.orders(), rehearsal)


@dataclass(frozen=True)
class _Division:
    """Who holds what, as every rank knows it.

    Attributes:
        names: of all parameters, with their places in the model.
        held: by stage, in the model's order.
        trained: likewise, those that are.
        holders: of parameters that several stages hold, the stages.
    """

    names: dict[str, int]
    held: list[list[str]]
    trained: list[list[str]]
    holders: dict[str, tuple[int, ...]]

    def orders(self) -> dict[int, tuple[int, ...]]:
        """See :class:`~hydra_ext.pipeline.parts.Parts`."""
        return {
            stage: tuple(self.names[n] if self.holders.get(n, (stage,))[0] == stage else -1 for n in of_stage)
            for stage, of_stage in enumerate(self.trained)
        }

    def shared(self) -> tuple[dict[int, int | None], ...]:
        """See :class:`~hydra_ext.pipeline.parts.Parts`."""
        several = sorted(self.holders, key=self.names.__getitem__)
        return tuple(
            {stage: self.trained[stage].index(name) for stage in self.holders[name]}
            for name in several
            if name in self.trained[self.holders[name][0]]
        )

    def trained_together(self) -> list[tuple[str, tuple[int, ...]]]:
        """Parameters that several stages train, with these."""
        return [(f"'{name}'", stages) for name, stages in self.holders.items() if name in self.trained[stages[0]]]


def _divide(model: nn.Module, rehearsal: Rehearsal, borders: Sequence[int]) -> _Division:
    parameters = dict(model.named_parameters())
    names = {name: number for number, name in enumerate(parameters)}
    held = [sorted(parameters_of(rehearsal, lo, hi, model), key=names.__getitem__) for lo, hi in pairwise(borders)]
    trained = [[name for name in of_stage if parameters[name].requires_grad] for of_stage in held]
    return _Division(names, held, trained, shared_parameters(rehearsal, borders[1:-1], model))


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise StateError(
        "this rank holds only its own stages of the model, so that model.state_dict() would have nothing behind the "
        "other names: pipe.state_dict() has what is here"
    )


def _compare(rehearsal: Rehearsal, watch: Watch) -> None:
    found = watch.meet("after the rehearsal", fingerprint(rehearsal.digest))
    other = next((rank for rank, each in enumerate(found) if each != found[0]), None)
    if other is not None:
        raise SplitError(
            f"rank {other} took another way through the model than rank 0 in its rehearsal: give all ranks the same "
            "model and the same microbatches"
        )


def _given(rehearsal: Rehearsal, stages: int, cuts: Sequence[str | int]) -> list[int]:
    """The borders of stages that begin at these cuts."""
    count = len(rehearsal.events)
    if len(cuts) != stages - 1:
        raise InvalidArgument(f"cuts={list(cuts)!r}: {stages} stages have {stages - 1} cuts")
    blocks = [event.name for event in rehearsal.events]
    found = []
    for cut in cuts:
        if isinstance(cut, str) and cut not in blocks:
            raise InvalidArgument(f"cuts names '{cut}', which is no block: the blocks are {', '.join(blocks)}")
        found.append(blocks.index(cut) if isinstance(cut, str) else cut)
    borders = [0, *found, count]
    if any(low >= high for low, high in pairwise(borders)):
        raise InvalidArgument(f"cuts={list(cuts)!r} are events {found} of {count}: give them in the forward's order")
    for cut in found:
        if rehearsal.boundaries[cut].reasons:
            raise SplitError(f"no cut can be made before '{blocks[cut]}': {rehearsal.boundaries[cut].reasons[0]}")
    return borders


def _chosen(model: nn.Module, rehearsal: Rehearsal, stages: int, seconds: Sequence[float]) -> tuple[int, ...]:
    """The cuts that let the slowest stage be fastest."""
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    users: dict[str, list[int]] = {}
    for number, event in enumerate(rehearsal.events):
        for name in event.parameters:
            users.setdefault(name, []).append(number)
    alone = [0] * len(rehearsal.events)
    for name, events in users.items():
        if len(events) == 1:
            alone[events[0]] += sizes[name]
    possible = set(rehearsal.possible_cuts)
    _refuse_too_few(rehearsal, stages)
    partition = partition_chain(
        [
            Event(forward_seconds=time, backward_seconds=_BACKWARD * time, parameter_bytes=size)
            for time, size in zip(seconds, alone, strict=True)
        ],
        [
            Boundary(crossing_bytes=rehearsal.crossing_bytes[b], possible=b in possible)
            for b in range(1, len(rehearsal.events))
        ],
        stages=stages,
        shared=[
            SharedParameters(nbytes=sizes[name], events=tuple(events))
            for name, events in users.items()
            if len(events) > 1
        ],
        bandwidth=_BYTES_PER_SECOND,
    )
    return partition.cuts


def _refuse_too_few(rehearsal: Rehearsal, stages: int) -> None:
    """Cuts, because of what the model does; that there are too few blocks the partition says."""
    refused = next((b for b, boundary in enumerate(rehearsal.boundaries) if boundary.reasons), None)
    possible = rehearsal.possible_cuts
    if refused is not None and len(possible) < stages - 1 < len(rehearsal.events):
        names = [event.name for event in rehearsal.events]
        where = ", ".join(f"'{names[b]}'" for b in possible) or "no block"
        raise SplitError(
            f"{stages} stages need {stages - 1} cuts, and they can be made before {where}: none before "
            f"'{names[refused]}', for instance, since {rehearsal.boundaries[refused].reasons[0]}"
        )


def _refuse_twice_here(division: _Division, own: Sequence[int]) -> None:
    """Several stages of one rank share the module's one place for a parameter, and its versions are of one stage."""
    for name, stages in division.holders.items():
        here = sorted(set(own).intersection(stages))
        if len(here) > 1:
            raise UnsupportedModel(
                f"'{name}' is used by stages {here}, which are on one rank: use other cuts=, or as many ranks as stages"
            )
