"""Which rank holds which tensors of a model. A checkpoint has them under the model's own names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hydra_ext.checkpoint.model_state import Named, named_tensors
from hydra_ext.errors import UnsupportedState
from hydra_ext.pipeline.ranks.topology import Topology
from hydra_ext.pipeline.stages.parts import Part, Parts
from hydra_ext.split.stages.stand_ins import is_absent
from hydra_ext.split.stages.state_dicts import permitted


@dataclass(frozen=True)
class Holdings:
    """The tensors of this rank, and the names of all tensors of the model.

    Attributes:
        own: This rank's parameters and persistent buffers, by name.
        kept: Names of those that this rank's place answers for: no other place saves them. They are the same in every
            replica.
        names: Names of all of the model's tensors.
        ties: See :class:`~hydra_ext.checkpoint.format.manifest.Manifest`.
        parameters: Names of all parameters, with their places in the model's order.
    """

    own: dict[str, Tensor]
    kept: frozenset[str]
    names: frozenset[str]
    ties: tuple[tuple[str, ...], ...]
    parameters: dict[str, int]

    @property
    def named(self) -> list[Named]:
        return [Named((name,), tensor) for name, tensor in self.own.items()]

    @property
    def name_of(self) -> dict[int, str]:
        """Names of this rank's tensors, by the tensor's ``id``."""
        return {id(tensor): name for name, tensor in self.own.items()}

    def own_buffers(self) -> dict[str, Tensor]:
        """The buffers that this rank's place answers for, by name."""
        own = self.own.items()
        return {name: tensor for name, tensor in own if not isinstance(tensor, nn.Parameter) and name in self.kept}


@dataclass(frozen=True)
class Held:
    """A tensor that this rank holds.

    Attributes:
        group: The tensor's key, the same on all ranks even if it has other names there.
        place: Its stage and number, which give the order of all tensors of the model.
        names: All names that it has here, the first one first.
        current: Whether its values here are up to date: only forwards of this rank change them, if any.
    """

    group: str
    place: tuple[int, int]
    names: tuple[str, ...]
    tensor: Tensor
    current: bool = True

    def as_json(self) -> list[Any]:
        return [self.group, list(self.place), list(self.names), isinstance(self.tensor, nn.Parameter), self.current]


def held_here(parts: Parts) -> tuple[list[Held], frozenset[str]]:
    """The tensors that this rank holds, and the names of all tensors of the model.

    The names are known for a plain model only. For explicit stages they are empty.

    Raises:
        UnsupportedState: The model has tensors that no checkpoint can hold.
    """
    if parts.model is not None:
        with permitted():
            named = named_tensors(parts.model)
        here = [
            Held(str(number), (0, number), each.names, each.tensor, not parts.elsewhere.intersection(each.names))
            for number, each in enumerate(named)
            if not is_absent(each.tensor)
        ]
        return here, frozenset(each.name for each in named)
    common = {id(t): f"common {n}" for n, held in enumerate(parts.common) for t in held.values() if t is not None}
    found: dict[int, Held] = {}
    for part in parts.own:
        for number, named_here in enumerate(_of_stage(part)):
            group = common.get(id(named_here.tensor), f"{part.stage} {number}")
            held = Held(group, (part.stage, number), named_here.names, named_here.tensor)
            known = found.get(id(held.tensor))
            names = held.names if known is None else (*known.names, *held.names)
            found[id(held.tensor)] = Held(group, held.place if known is None else known.place, names, held.tensor)
    return list(found.values()), frozenset()


def _of_stage(part: Part) -> list[Named]:
    return [
        Named(tuple(f"{part.stage}.{name}" for name in each.names), each.tensor)
        for module in part.modules
        for each in named_tensors(module)
    ]


def agreed(
    here: Sequence[Held], known: frozenset[str], everyone: Sequence[Sequence[list[Any]]], topology: Topology
) -> Holdings:
    """Makes the holdings from what all ranks hold.

    Args:
        here: This rank's tensors.
        known: The names of all tensors, from :func:`held_here`.
        everyone: What each rank of the first replica holds, as :meth:`Held.as_json` gives it, by rank. Other replicas'
            lists are empty.

    Raises:
        UnsupportedState: A tensor is up to date on no rank.
    """
    holders: dict[str, list[tuple[tuple[int, int], int, list[str], bool, bool]]] = {}
    for rank, said in enumerate(everyone):
        for group, place, names, is_parameter, current in said:
            holders.setdefault(group, []).append((tuple(place), rank, names, is_parameter, current))
    ordered = sorted((sorted(held, key=lambda each: each[:2]), group) for group, held in holders.items())
    name_of: dict[str, str] = {}
    place_of: dict[str, int] = {}
    ties, parameters = [], []
    for held, group in ordered:
        names = tuple(dict.fromkeys(name for each in held for name in each[2]))
        name_of[group] = names[0]
        if len(names) > 1:
            ties.append(names)
        if held[0][3]:
            parameters.append(names[0])
        keeper = next((rank for _, rank, _, _, current in held if current), None)
        if keeper is not None:
            place_of[group] = topology.place_of(keeper)
    lost = (known | set(name_of.values())) - {name_of[group] for group in place_of}
    if lost:
        raise UnsupportedState(
            f"'{min(lost)}' of the model is up to date on no rank, since no stage needs it, and a checkpoint would "
            "lose it: use it in the forward, or remove it from the model"
        )
    return Holdings(
        own={name_of[each.group]: each.tensor for each in here},
        kept=frozenset(name_of[each.group] for each in here if place_of[each.group] == topology.place),
        names=frozenset(name_of.values()),
        ties=tuple(ties),
        parameters={name: number for number, name in enumerate(parameters)},
    )
