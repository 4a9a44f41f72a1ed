"""The stages of a rank whose weights may be larger than its device: every version of them stays on the host.

The engine of :mod:`hydra_ext.offload` brings each block to the device when a forward or a backward needs it. For each
version that may be alive, a block has memory on the host and device parameters. A module's call uses the version whose
leaves :class:`~hydra_ext.pipeline.stages.versions.StageWeights` has put into the modules. A graph holds the device
parameters of the version it was built with, so that its backward brings that version back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hydra_ext import _C
from hydra_ext.blocks import Block, Layout, Site, block_limit, discover
from hydra_ext.errors import BudgetTooSmall, UnsupportedModel
from hydra_ext.pipeline.stages.versions import StageWeights
from hydra_ext.policy import Checks
from hydra_ext.runtime.placement.devices import Place
from hydra_ext.runtime.placement.residents import buffer_bytes
from hydra_ext.runtime.reporting.report import Report
from hydra_ext.runtime.run import Run
from hydra_ext.split import is_absent
from hydra_ext.state.layout import copied


@dataclass(frozen=True)
class TierOptions:
    """The options of a tier: see :class:`Tier`."""

    budget: int
    place: Place
    checks: Checks


class Tier:
    """The device of one rank, under a budget.

    Args:
        modules: The modules of all of the rank's stages, on the host.
        weights: The weights of each stage, with the leaves of all versions.
        options: The budget, the device and the checks. The budget is device bytes for weights, gradients and
            activations together.

    Attributes:
        hosts_hold_weights: Whether host parameters hold the weights even while the device computes with them, so that
            an update can read them meanwhile.

    Raises:
        BudgetTooSmall: The budget cannot hold the largest block.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        weights: Sequence[StageWeights],
        options: TierOptions,
    ) -> None:
        budget, place, checks = options.budget, options.place, options.checks
        self.hosts_hold_weights = not checks.poison_hosts
        roots = list(dict.fromkeys(modules))
        root = roots[0] if len(roots) == 1 else nn.ModuleList(roots)
        layout = _versioned(_present(_layout(root, budget)), weights)
        place.expect_room(budget, *_largest_block(layout, root, budget))
        arena = place.make_arena()
        core = _C.PagedModel(
            backend=place.make_backend(),
            arena=arena,
            device=place.device,
            gradient_bound=place.gradient_bound(budget),
            budget=budget,
            face_dtype=None,
            gradient_dtype=None,
            poison_hosts=checks.poison_hosts,
            fault_path=checks.fault_path,
        )
        for each in weights:
            each.release_own()  # so that the arena can take the leaves' memory
        for block in layout.blocks:
            core.add_block(block.name, list(block.parameters))
        for each in weights:
            each.point_own()
        self.run = Run(root, layout, core, budget=budget, place=place)
        try:
            self.run.open(None, arena)
        except BaseException:  # re-raised: no close() is called after this
            self.run.close()
            raise

    def show(self, slot: int) -> None:
        """Makes modules use the leaves of this slot from now on."""
        self.run.version = slot
        self.run.core.arrivals.set_version(slot)

    def admit(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns tensors from another rank in memory that counts in the budget; copies where it does not count yet."""
        if self.run.device.type != "cpu" or not tensors:
            return tensors  # torch's allocator has counted it
        with torch.no_grad(), self.run.window(_C.PassKind.INFERENCE):
            return tuple(copied(tensor) for tensor in tensors)

    def report(self) -> Report:
        return self.run.report()

    def close(self) -> None:
        self.run.close()


def _layout(root: nn.Module, budget: int) -> Layout:
    total = sum(parameter.nbytes for parameter in root.parameters() if not is_absent(parameter))
    layout = discover(root, largest_bytes=block_limit(total, budget))
    if layout.composites:
        raise UnsupportedModel(
            f"the parameter '{layout.composites[0].name}' is quantised: a pipeline moves plain weights alone"
        )
    return layout


def _present(layout: Layout) -> Layout:
    """The layout without parameters that other ranks hold."""
    blocks: list[Block] = []
    number: dict[int, int] = {}
    for index, block in enumerate(layout.blocks):
        parameters = tuple((name, p) for name, p in block.parameters if not is_absent(p))
        if parameters:
            number[index] = len(blocks)
            blocks.append(Block(block.name, parameters))
    sites = [replace(s, blocks=tuple(number[b] for b in s.blocks if b in number)) for s in layout.sites]
    return Layout(blocks, [site for site in sites if site.blocks])


def _versioned(layout: Layout, weights: Sequence[StageWeights]) -> Layout:
    """The layout with a block for each slot: trained parameters in every slot, frozen ones in a block of their own."""
    slots = max((len(each.slots) for each in weights), default=1)
    leaves: dict[Tensor, list[nn.Parameter]] = {
        parameter: each.leaves_of(index) for each in weights for index, (_, parameter) in enumerate(each.parameters)
    }
    blocks: list[Block] = []  # of all slots
    frozen: dict[int, int] = {}
    trained: dict[int, list[int]] = {}
    for index, block in enumerate(layout.blocks):
        still = tuple((name, p) for name, p in block.parameters if p not in leaves)
        if still:
            frozen[index] = len(blocks)
            blocks.append(Block(block.name if len(still) == len(block.parameters) else f"{block.name} (frozen)", still))
        moving = [(name, p) for name, p in block.parameters if p in leaves]
        for slot in range(slots if moving else 0):
            there = tuple((name, leaves[p][slot]) for name, p in moving if slot < len(leaves[p]))
            trained.setdefault(index, []).append(len(blocks) if there else trained[index][0])
            if there:
                blocks.append(Block(block.name if slots == 1 else f"{block.name} ({slot})", there))
    sites = []
    for site in layout.sites:
        of_slot = [
            tuple(
                b
                for i in site.blocks
                for b in (frozen.get(i), trained[i][slot] if i in trained else None)
                if b is not None
            )
            for slot in range(slots)
        ]
        sites.append(Site(site.name, site.module, of_slot[0], tuple(of_slot[1:])))
    return Layout(blocks, sites)


def _largest_block(layout: Layout, root: nn.Module, budget: int) -> tuple[str, int]:
    """Name and bytes of the largest block, which fits into the budget."""
    alignment = _C.PAGE_ALIGNMENT
    sizes = {b.name: sum(-(-p.nbytes // alignment) * alignment for _, p in b.parameters) for b in layout.blocks}
    buffers = buffer_bytes(root)
    name, size = max(sizes.items(), key=lambda item: item[1], default=("", 0))
    if size + buffers > budget:
        raise BudgetTooSmall(
            f"budget={budget} cannot hold the largest block '{name}' of {_C.human_bytes(size)} beside buffers of "
            f"{_C.human_bytes(buffers)}: give at least {size + buffers} bytes, and room for activations on top",
            block=name,
            block_bytes=size,
            needed=size + buffers,
        )
    return name, size
