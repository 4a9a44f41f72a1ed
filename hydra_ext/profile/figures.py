"""The figures of one microbatch, module by module. Plain values: a dry run and a real step fill the same form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


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
class Profile:
    """The figures of one microbatch.

    Attributes:
        modules: By name, a module before those inside it.
        blocks: The model's weights, in the order of the model.
        sites: Numbers of the blocks that a module uses itself, by the module's name.
        backward_ratio: Seconds of a backward for each second of its forward.
    """

    modules: Mapping[str, ModuleFigures]
    blocks: tuple[BlockFigures, ...] = ()
    sites: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    backward_ratio: float = 2.0

    def children(self, name: str) -> list[ModuleFigures]:
        """The modules directly inside one, in the model's order."""
        prefix = f"{name}." if name else ""
        return [
            figures
            for other, figures in self.modules.items()
            if other and other.startswith(prefix) and "." not in other[len(prefix) :]
        ]

    def blocks_of(self, name: str) -> list[int]:
        """Numbers of the blocks that a module uses, with the modules inside it."""
        prefix = f"{name}." if name else ""
        used = [blocks for site, blocks in self.sites.items() if site == name or site.startswith(prefix)]
        return sorted({block for blocks in used for block in blocks})

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
