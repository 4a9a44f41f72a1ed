"""The figures of one microbatch, module by module. Plain values: a dry run and a real step fill the same form."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

Storage = tuple[int, int]  # the number of a storage, and the version of its numbers

_GROUP = re.compile(r"(?:(?P<sequential>.+)\.)?\[(?P<first>\d+):(?P<end>\d+)\]")


@dataclass(frozen=True, kw_only=True)
class Amount:
    """Bytes of storages.

    Attributes:
        fresh: Of storages that no earlier module has saved in this microbatch.
        all: Of these and of storages that an earlier module has saved, too.
    """

    fresh: int = 0
    all: int = 0


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """The most bytes in use at once, as in :class:`ModuleFigures`.

    Attributes:
        forward_bytes: Of activations in forward.
        backward_bytes: Likewise in backward.
        live_gradient_bytes: What gradients of parameters add to ``backward_bytes``; None where that was not measured.
    """

    forward_bytes: int = 0
    backward_bytes: int = 0
    live_gradient_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModuleFigures:
    """A module's share of one microbatch, with the modules inside it. A storage counts once.

    Attributes:
        name: Its name in the model; empty for the model itself, whose figures are those of the whole microbatch.
        order: Number of its first call among all calls of modules.
        calls: Number of its calls; 0 if it was not called as a module.
        forward_seconds: Time of its forward, without waits.
        again_seconds: Of these, until it has saved its last tensor, where a second call ends. None if it saves nothing,
            or where that was not measured.
        saved: What its forward saves for backward.
        inputs: Its arguments, without parameters and buffers: what a second call needs. Tensors below 1 KiB do not
            count, here and in ``saved``.
        parked_bytes: Activations that are alive when it begins, if each saved one leaves at once. One that is saved
            and still in use counts.
        forward_bytes: The most activations in use at once in its forward, if each saved one leaves at once.
        backward_bytes: Likewise in its backward, if each saved one comes when it is read. Gradients of parameters do
            not count.
        live_gradient_bytes: What gradients of parameters add to ``backward_bytes``, each from its first bytes until it
            is summed. None where that was not measured.
        own: The same three outside of the calls inside.
        is_repeatable: Whether a second call would do the same: it has one call, no inputs that it writes to, and no
            hooks of the user.
    """

    name: str
    order: int = 0
    calls: int = 0
    forward_seconds: float = 0.0
    again_seconds: float | None = None
    saved: Amount = field(default_factory=Amount)
    inputs: Amount = field(default_factory=Amount)
    parked_bytes: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    live_gradient_bytes: int | None = None
    own: Peaks = field(default_factory=Peaks)
    is_repeatable: bool = False


@dataclass(frozen=True, kw_only=True)
class BlockFigures:
    """Weights that move together.

    Attributes:
        name: The name of the module that uses them first.
        weight_bytes: On the device.
        gradient_bytes: Of the parameters that need gradients.
    """

    name: str
    weight_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Bytes on the device while a module runs, as few as can be.

    Attributes:
        module: Its name.
        way: ``forward`` or ``backward``.
        activations: That are alive.
        weights: Of the blocks in use.
        gradients: Of parameters.
    """

    module: str
    way: str
    activations: int
    weights: int = 0
    gradients: int = 0

    @property
    def nbytes(self) -> int:
        return self.activations + self.weights + self.gradients


@dataclass(frozen=True, kw_only=True)
class Link:
    """One of the calls that an ``nn.Sequential`` makes of its children.

    Attributes:
        figures: Of this call alone. It is repeatable if the child has no hooks of the user.
        fresh: Bytes by storage that no earlier call has saved.
        saved: Bytes by storage of all that it saves.
        inputs: Storages among its arguments.
        intact_until: Number of the first call of the Sequential that writes to this call's arguments.
    """

    figures: ModuleFigures
    fresh: Mapping[Storage, int]
    saved: Mapping[Storage, int]
    inputs: Collection[Storage]
    intact_until: int


@dataclass(frozen=True)
class GroupPlace:
    """Consecutive children of an ``nn.Sequential``, from the first up to and without the end."""

    sequential: str
    first: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The calls that an ``nn.Sequential`` makes of its children, each with what the one before it returns.

    Consecutive ones are a *group*, which can run again as one. Its name is that of the Sequential with the numbers of
    the first call and of the one behind the last, such as ``features.[0:5]``.
    """

    name: str
    links: Sequence[Link]

    def name_of(self, first: int, end: int) -> str:
        return f"{self.name}.[{first}:{end}]".lstrip(".")

    def group(self, first: int, end: int) -> ModuleFigures:
        """The figures of consecutive calls.

        What one group saves and the next one takes and saves is the next one's, which needs it even if the first one
        runs again. So ``inputs`` are all fresh. They are alive as long as the group runs.
        """
        links = self.links[first:end]
        parts = [link.figures for link in links]
        saved: dict[Storage, int] = {}
        for link in links:
            saved.update(link.saved)
        inputs = Amount(fresh=parts[0].inputs.all, all=parts[0].inputs.all)
        backward_bytes = max(part.backward_bytes for part in parts)
        most = [
            part.backward_bytes + part.live_gradient_bytes for part in parts if part.live_gradient_bytes is not None
        ]
        return ModuleFigures(
            name=self.name_of(first, end),
            order=parts[0].order,
            calls=1,
            forward_seconds=sum(part.forward_seconds for part in parts),
            again_seconds=self.again_seconds(first, end),
            saved=Amount(fresh=sum(self.own_bytes(at) for at in range(first, end)), all=sum(saved.values())),
            inputs=inputs,
            parked_bytes=parts[0].parked_bytes,
            forward_bytes=max(part.forward_bytes + (inputs.all if at else 0) for at, part in enumerate(parts)),
            backward_bytes=backward_bytes,
            live_gradient_bytes=max(most) - backward_bytes if len(most) == len(parts) else None,
            is_repeatable=links[0].intact_until >= end and all(part.is_repeatable for part in parts),
        )

    def again_seconds(self, first: int, end: int) -> float | None:
        """Time of consecutive calls until the last tensor is saved. None if that is unknown."""
        parts = [link.figures for link in self.links[first:end]]
        while parts:
            last = parts.pop()
            if last.again_seconds is not None:
                return sum(part.forward_seconds for part in parts) + last.again_seconds
        return None

    def own_bytes(self, at: int) -> int:
        """What a call saves, without what the next one takes and saves, and with what it takes so itself."""
        return sum(self.links[at].fresh.values()) + self._handed_on(at - 1) - self._handed_on(at)

    def _handed_on(self, at: int) -> int:
        if not 0 <= at < len(self.links) - 1:
            return 0
        after = self.links[at + 1]
        return sum(size for key, size in self.links[at].fresh.items() if key in after.inputs and key in after.saved)


def _and_around(name: str) -> Iterator[str]:
    """A module's name, and those of the modules around it; the root's is not one."""
    while name:
        yield name
        name = name.rpartition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The figures of one microbatch.

    Attributes:
        modules: By name, a module before those inside it.
        blocks: The model's weights, in the order of the model.
        sites: Numbers of the blocks that a module uses itself, by the module's name.
        backward_ratio: Seconds of a backward for each second of its forward.
        chains: Of each ``nn.Sequential`` that was called once, by its name.
    """

    modules: Mapping[str, ModuleFigures]
    blocks: tuple[BlockFigures, ...] = ()
    sites: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    backward_ratio: float = 2.0
    chains: Mapping[str, Chain] = field(default_factory=dict)

    def segment(self, name: str) -> ModuleFigures:
        """The figures of a module, or of a group."""
        place = self.place_of(name)
        return self.modules[name] if place is None else self.chains[place.sequential].group(place.first, place.end)

    def place_of(self, name: str) -> GroupPlace | None:
        """Where a group is; None for the name of a module."""
        found = None if name in self.modules else _GROUP.fullmatch(name)
        return found and GroupPlace(found["sequential"] or "", int(found["first"]), int(found["end"]))

    def members(self, name: str) -> list[str]:
        """The module of this name, or the modules of a group, each as often as it is called there."""
        place = self.place_of(name)
        if place is None:
            return [name]
        return [link.figures.name for link in self.chains[place.sequential].links[place.first : place.end]]

    def outside(self, names: Sequence[str]) -> Iterator[ModuleFigures]:
        """The modules that are called outside of some segments, or contain them."""
        groups = [name for name in names if self.place_of(name) is not None]
        calls = Counter(member for name in groups for member in self.members(name))
        inside = {member for member, count in calls.items() if count >= self.modules[member].calls}
        inside.update(name for name in names if name not in groups)
        if "" not in inside:
            yield from (figures for name, figures in self.modules.items() if inside.isdisjoint(_and_around(name)))

    def refusing(self, names: Collection[str]) -> Profile:
        """The same, but these modules and groups are not to be repeated, nor longer groups that begin with one."""
        places = [place for place in map(self.place_of, names) if place is not None]
        ends = {(place.sequential, place.first): place.end for place in places}

        def link_of(chain: Chain, at: int) -> Link:
            link = chain.links[at]
            intact = min(link.intact_until, ends.get((chain.name, at), link.intact_until + 1) - 1)
            return replace(link, figures=self._refused(link.figures, names), intact_until=intact)

        return replace(
            self,
            modules={name: self._refused(figures, names) for name, figures in self.modules.items()},
            chains={
                name: replace(chain, links=[link_of(chain, at) for at in range(len(chain.links))])
                for name, chain in self.chains.items()
            },
        )

    @staticmethod
    def _refused(figures: ModuleFigures, names: Collection[str]) -> ModuleFigures:
        return replace(figures, is_repeatable=False) if figures.name in names else figures

    def children(self, name: str) -> list[ModuleFigures]:
        """The modules directly inside one, in the model's order."""
        return self._children.get(name, [])

    @cached_property
    def _children(self) -> Mapping[str, list[ModuleFigures]]:
        found: dict[str, list[ModuleFigures]] = {}
        for name, figures in self.modules.items():
            if name:
                found.setdefault(name.rpartition(".")[0], []).append(figures)
        return found

    def blocks_of(self, name: str) -> list[int]:
        """Numbers of the blocks that a module or a group uses, with the modules inside it."""
        return sorted({block for member in self.members(name) for block in self._blocks_inside.get(member, ())})

    @cached_property
    def _blocks_inside(self) -> Mapping[str, set[int]]:
        found: dict[str, set[int]] = {}
        for site, blocks in self.sites.items():
            for name in ("", *_and_around(site)):
                found.setdefault(name, set()).update(blocks)
        return found

    def moments(self) -> Iterator[Moment]:
        """What a step takes at least, beside the buffers, as a whole and at each module that uses blocks itself.

        All that is saved is on the host until it is read, and each gradient leaves when it is summed. Where gradients
        were not measured, all of the blocks in use count.
        """
        for name, numbers in {"": (), **self.sites}.items():
            figures, used = self.modules[name], [self.blocks[number] for number in numbers]
            weights, gradients = sum(block.weight_bytes for block in used), figures.live_gradient_bytes
            if gradients is None:
                gradients = sum(block.gradient_bytes for block in used)
            yield Moment(module=name, way="forward", activations=figures.forward_bytes, weights=weights)
            yield Moment(
                module=name, way="backward", activations=figures.backward_bytes, weights=weights, gradients=gradients
            )

    def neediest(self) -> Moment:
        """The moment that sets the smallest budget."""
        return max(self.moments(), key=lambda moment: moment.nbytes)

    def least_bytes(self) -> int:
        """The smallest budget for a step beside the buffers."""
        return self.neediest().nbytes
