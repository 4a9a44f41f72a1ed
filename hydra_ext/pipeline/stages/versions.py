"""The versions of a stage's weights that are alive together.

The optimizer and all code outside a step hold the user's own parameters. A microbatch's graph is built on *version
parameters*: there is one set of leaves for each version that may be alive at the same time. They are in the modules'
dictionaries while a forward or a backward of that version runs. A graph therefore keeps the weights it was built with,
and their memory does not change before its backward.

An update writes the next version into the memory of a version that nothing uses any more. The user's parameters then
share that memory. A native optimizer (:mod:`hydra_ext.optim`) without hooks reads the newest version and writes the
next one. Any other optimizer updates in place, so that the newest version is copied there first. Where a single version
is alive, the user's parameters are the leaves themselves, and are updated in place.

Autograd's version counters show other writes to weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from hydra_ext.errors import StateError
from hydra_ext.runtime.placement.faces import dress
from hydra_ext.split.state.listed import listed_parameters


class Step(Protocol):
    """One step of an optimizer."""

    @property
    def writes_elsewhere(self) -> bool:
        """Whether it can write the new weights to other memory than that of the newest ones."""

    def __call__(self, destinations: Mapping[Tensor, Tensor] | None) -> None:
        """Makes the step.

        Args:
            destinations: Where each parameter's new weights go; None for the parameters themselves.
        """


@dataclass
class _Place:
    """One place of a parameter: in a module's dictionary, or in a list on a module. A parameter may have several."""

    holder: Any
    key: Any
    index: int


@dataclass
class _Slot:
    """Memory for one version of all weights."""

    leaves: list[nn.Parameter]
    counters: list[int] = field(default_factory=list)  # version counters of the leaves when they were last written

    def note(self) -> None:
        self.counters = [leaf._version for leaf in self.leaves]


class StageWeights:
    """The versions of one stage's weights. The thread that makes the steps owns them.

    Args:
        parameters: Names and trained parameters of the user, each parameter once. Frozen ones have no versions.
        modules: The modules that hold them.
        alive: Number of versions that are alive together.
        at_once: Whether to make the leaves of all versions now. Otherwise they are made when they are first needed.

    Attributes:
        newest: Number of the newest version. Training starts with 0.
        on_show: Called with the number of the slot whose leaves the modules have from now on.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        modules: Sequence[nn.Module],
        *,
        alive: int,
        at_once: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self.newest = 0
        self._alive = alive
        index = {id(parameter): number for number, (_, parameter) in enumerate(self.parameters)}
        seen = {module: None for root in modules for module in root.modules()}
        self._places = [
            _Place(holder, key, index[id(parameter)])
            for holder, key, parameter in [
                *((module._parameters, key, each) for module in seen for key, each in module._parameters.items()),
                *listed_parameters(modules),
            ]
            if id(parameter) in index
        ]
        self._slots: list[_Slot] = []
        self._slot_of: dict[int, int] = {0: 0}  # by version
        self._own_counters: list[int] = []
        self._shown: int | None = None  # the slot whose leaves are in the modules
        self.on_show: Callable[[int], None] = _nothing
        if alive == 1:
            self._slots.append(_Slot([parameter for _, parameter in self.parameters]))
        else:
            self._slots.append(_Slot([_leaf(parameter, parameter.data) for _, parameter in self.parameters]))
        self._slots[0].note()
        while at_once and len(self._slots) < alive:
            self._add_slot()
        self._note_own()

    # ---- for the runtime --------------------------------------------------------------------------------------------

    def show(self, version: int) -> None:
        """Puts this version's leaves into the modules.

        Raises:
            StateError: The version was written to since it was made.
        """
        slot = self._slot_of[version]
        if self._alive > 1:
            self._check(slot)
            if self._shown != slot:
                self._put(self._slots[slot].leaves)
        self._shown = slot
        self.on_show(slot)

    def hide(self) -> None:
        """Puts the user's own parameters into the modules."""
        if self._shown is not None and self._alive > 1:
            self._put([parameter for _, parameter in self.parameters])
        self._shown = None

    def take_gradients(self, version: int) -> list[Tensor | None]:
        """Takes the gradients that backwards of this version have summed, in the order of the parameters."""
        gradients = []
        for leaf in self._slots[self._slot_of[version]].leaves:
            gradients.append(leaf.grad)
            leaf.grad = None
        return gradients

    def begin(self, version: int, step: Callable[[Mapping[Tensor, Tensor]], None]) -> None:
        """Lets ``step`` begin to write the version after the newest. :meth:`update` publishes it later.

        The schedule begins an update only where nothing uses the version whose memory it overwrites.

        Raises:
            StateError: The user's parameters were written to. Or a schedule that was not verified begins the update
                before the version before it exists, or where it would overwrite the only version.
        """
        if self._alive == 1 or version != self.newest + 1:
            raise StateError(
                f"version {version} was begun while version {self.newest} is the newest and {self._alive} may be alive "
                "together: use a schedule that verify() accepts"
            )
        self.check_own()
        leaves = self._slots[self._retired(version)].leaves
        step(dict(zip([parameter for _, parameter in self.parameters], leaves, strict=True)))

    def update(self, version: int, step: Step | None) -> None:
        """Makes version ``version`` the newest. Without a step it has the weights of the version before.

        Raises:
            StateError: The user's parameters were written to.
        """
        self.check_own()
        current = self._slot_of[self.newest]
        target = current
        if step is not None and self._alive == 1:
            step(None)
        elif step is not None:
            target = self._retired(version)
            self._write(current, target, step)
        self._slot_of[version] = target
        self.newest = version
        for old in [known for known in self._slot_of if known <= version - self._alive]:
            del self._slot_of[old]
        self._slots[target].note()
        self._note_own()

    def check_own(self) -> None:
        """
        Raises:
            StateError: The user's parameters were written to since the last update, and several versions may be alive.
        """
        if self._alive == 1:
            return
        for (name, parameter), counter in zip(self.parameters, self._own_counters, strict=True):
            if parameter._version != counter:
                raise StateError(
                    f"'{name}' was written to between two steps, while the pipeline has microbatches or an update of "
                    "it under way: call pipe.drain() before changing weights, and pipe.refresh() after it, on all ranks"
                )

    def refresh(self) -> None:
        """Makes the user's parameters, as they are now, all versions. No microbatch or update may be under way."""
        newest = self._slots[self._slot_of[self.newest]]
        with torch.no_grad():
            for leaf, (_, parameter) in zip(newest.leaves, self.parameters, strict=True):
                if leaf is not parameter:
                    leaf.data = parameter.data
                    leaf.requires_grad_(parameter.requires_grad)
        slot = self._slot_of[self.newest]
        self._slot_of = dict.fromkeys(range(max(0, self.newest - self._alive + 1), self.newest + 1), slot)
        newest.note()
        self._note_own()

    def older(self, age: int) -> list[nn.Parameter] | None:
        """The weights of the version that is ``age`` before the newest; None if they equal the version after it."""
        slot = self._slot_of[self.newest - age]
        return None if slot == self._slot_of[self.newest - age + 1] else self._slots[slot].leaves

    @torch.no_grad()
    def restore(self, newest: int, older: Sequence[Callable[[int], Tensor | None] | None]) -> None:
        """Makes the user's parameters, which a checkpoint has filled, version ``newest``, and fills older versions.

        No microbatch or update may be under way.

        Args:
            older: One function for each older version, the latest first. It gives a parameter's weights, by the
                parameter's index, or None if they equal the version after it. None in place of a function means that
                for all parameters.
        """
        self._slot_of = {newest: self._slot_of[self.newest]}
        self.newest = newest
        self.refresh()
        for age, weights in enumerate(older, 1):
            after = self._slot_of[newest - age + 1]
            if weights is None:
                self._slot_of[newest - age] = after
                continue
            slot = self._free({self._slot_of[newest - known] for known in range(age)})
            leaves = zip(self._slots[slot].leaves, self._slots[after].leaves, strict=True)
            for index, (leaf, same) in enumerate(leaves):
                value = weights(index)
                leaf.copy_(same if value is None else value)
            self._slots[slot].note()
            self._slot_of[newest - age] = slot

    @property
    def nbytes(self) -> int:
        """Bytes of all versions that have memory."""
        return sum(leaf.nbytes for slot in self._slots for leaf in slot.leaves)

    # ---- for a tier ------------------------------------------------------------------------------------------------

    @property
    def slots(self) -> list[list[nn.Parameter]]:
        """The leaves of each slot."""
        return [slot.leaves for slot in self._slots]

    def leaves_of(self, index: int) -> list[nn.Parameter]:
        """The leaves of one parameter, by slot."""
        return [slot.leaves[index] for slot in self._slots]

    def release_own(self) -> None:
        """Drops the user's parameters' references to the newest version's memory, until :meth:`point_own`."""
        if self._alive > 1:
            for _, parameter in self.parameters:
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    def point_own(self) -> None:
        """Lets the user's parameters share the newest version's memory again."""
        if self._alive > 1:
            leaves = self._slots[self._slot_of[self.newest]].leaves
            for (_, parameter), leaf in zip(self.parameters, leaves, strict=True):
                parameter.data = leaf.data

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _add_slot(self) -> None:
        leaves = [_leaf(parameter, torch.empty_like(parameter)) for _, parameter in self.parameters]
        self._slots.append(_Slot(leaves))
        self._slots[-1].note()

    def _retired(self, version: int) -> int:
        """A slot without a version that is alive together with ``version``."""
        free = self._free({slot for known, slot in self._slot_of.items() if known > version - self._alive})
        self._check(free)
        return free

    def _free(self, used: Collection[int]) -> int:
        """A slot that is not in ``used``; a new one if there is no other."""
        for number in range(len(self._slots)):
            if number not in used:
                return number
        self._add_slot()
        return len(self._slots) - 1

    @torch.no_grad()
    def _write(self, current: int, target: int, step: Step) -> None:
        leaves = self._slots[target].leaves
        own = [parameter for _, parameter in self.parameters]
        if step.writes_elsewhere:
            before = [leaf._version for leaf in leaves]
            step(dict(zip(own, leaves, strict=True)))
            for leaf, parameter, counter in zip(leaves, own, before, strict=True):
                if leaf._version == counter:  # it has no gradient, or the optimizer does not have it
                    leaf.copy_(parameter)
            for leaf, parameter in zip(leaves, own, strict=True):
                parameter.data = leaf.data
        else:
            torch._foreach_copy_(list[Tensor](leaves), list[Tensor](own))
            for leaf, parameter in zip(leaves, own, strict=True):
                parameter.data = leaf.data
            step(None)
        increment_version(leaves)  # so that a graph of the overwritten version raises in its backward

    def _check(self, slot: int) -> None:
        for leaf, counter, (name, _) in zip(
            self._slots[slot].leaves, self._slots[slot].counters, self.parameters, strict=True
        ):
            if leaf._version != counter:
                raise StateError(
                    f"a version of '{name}' that the pipeline keeps was written to in place, by the forward or "
                    "through a parameter that was kept from there: write to the model's parameters outside steps, "
                    "after pipe.drain(), and call pipe.refresh()"
                )

    def _note_own(self) -> None:
        self._own_counters = [parameter._version for _, parameter in self.parameters]

    def _put(self, parameters: Sequence[nn.Parameter]) -> None:
        for place in self._places:
            place.holder[place.key] = parameters[place.index]


def _nothing(slot: int) -> None:
    pass


def _leaf(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    leaf = nn.Parameter(data.detach(), requires_grad=parameter.requires_grad)
    dress(leaf, parameter)
    return leaf
