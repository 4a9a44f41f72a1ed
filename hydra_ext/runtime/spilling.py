"""Which blocks have their optimizer's state on the disk, so that the host stays within its budget.

Weights and gradients stay on the host. Of the state as many blocks' go to the disk as have to, those first that an
update reaches last; an update reads a block's state into working memory, ahead of the one before, and writes it behind.
Each step so reads and writes the state on the disk once. What an operation outside an update has brought to the host
goes back in the next step.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hydra_ext import _C
from hydra_ext.blocks import Layout
from hydra_ext.errors import HostBudgetTooSmall, InvalidArgument, SpillError
from hydra_ext.optim.host_optimizer import HostOptimizer
from hydra_ext.policy import parse_bytes


@dataclass(frozen=True)
class HostLimit:
    """What a run may hold on the host, and where the rest goes.

    Attributes:
        budget: bytes of weights, gradients and optimizer state together.
        folder: exists, on a disk of this machine.
        files: as in :class:`hydra_ext.Checks`.
    """

    budget: int
    folder: Path
    files: Any = None

    @classmethod
    def of(cls, budget: int | str | None, folder: str | os.PathLike[str] | None, files: Any = None) -> HostLimit | None:
        """None if neither is given.

        Raises:
            InvalidArgument: one is given without the other.
            InvalidBudget: the budget is no size.
            SpillError: the folder cannot be made.
        """
        if budget is None and folder is None:
            return None
        if budget is None or folder is None:
            given, missing = ("spill_dir=", "host_budget=") if budget is None else ("host_budget=", "spill_dir=")
            raise InvalidArgument(f"{given} was given without {missing}: the one says how much, the other where")
        path = Path(folder)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SpillError(
                f"spill_dir '{path}' cannot be made: {error}; name a folder that this process may write to"
            ) from error
        return cls(parse_bytes(budget), path, files)


class Spilling:
    """Of one run.

    Raises:
        HostBudgetTooSmall: even with all state on the disk the host would hold more.
        SpillError: the folder cannot be used.
    """

    def __init__(self, core: _C.PagedModel, layout: Layout, optimizer: HostOptimizer, limit: HostLimit) -> None:
        self._core = core
        self._optimizer = optimizer
        self._parameters = [[parameter for _, parameter in block.parameters] for block in layout.blocks]
        sizes = optimizer.state_sizes()
        self._spilled = blocks_to_spill(layout, optimizer, limit)
        self._block_of: dict[Tensor, int] = {
            parameter: block for block in self._spilled for parameter in self._parameters[block]
        }
        if self._spilled:  # all room now: a full disk in the middle of a step would be too late
            moving = [size for parameter in self._block_of for size in sizes.get(parameter, ()) if _goes(size)]
            core.open_disk(str(limit.folder), moving, limit.files)

    def new_state(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Zeros, where the parameter's state belongs."""
        block = self._block_of.get(parameter)
        if block is None:
            return torch.zeros_like(parameter, dtype=dtype)
        return self._core.make_zeros_on_disk(block, parameter.detach(), dtype)

    def settle(self, blocks: Iterable[int]) -> None:
        """What was brought to the host, or made there, goes to the disk."""
        for block in self._spilled.intersection(blocks):
            parameters = self._parameters[block]
            state = [tensor for parameter in parameters for tensor in self._optimizer.tensors_beside(parameter)]
            self._core.settle_on_disk(block, state)


def blocks_to_spill(layout: Layout, optimizer: HostOptimizer, limit: HostLimit) -> set[int]:
    """The blocks whose state has to be on the disk. Nothing has to have memory yet.

    Raises:
        HostBudgetTooSmall: as :class:`Spilling`.
    """
    parameters = [[parameter for _, parameter in block.parameters] for block in layout.blocks]
    return _choose(parameters, optimizer.state_sizes(), limit.budget)


def _choose(blocks: Sequence[Sequence[Tensor]], state: Mapping[Tensor, Sequence[int]], budget: int) -> set[int]:
    """As few as need be.

    Args:
        state: bytes of each tensor beside a parameter.
    """

    def sizes(block: int) -> list[int]:
        return [size for parameter in blocks[block] for size in state.get(parameter, ())]

    held = 2 * sum(parameter.nbytes for block in blocks for parameter in block)  # with gradients
    held += sum(sum(sizes(block)) for block in range(len(blocks)))
    spilled: set[int] = set()
    working = 0
    for block in reversed(range(len(blocks))):
        if held + working <= budget:
            break
        moving = [size for size in sizes(block) if _goes(size)]
        if moving:
            spilled.add(block)
            held -= sum(moving)
            working = max(working, _C.DISK_WORKING_SETS * sum(map(_on_disk, moving)))
    if held + working > budget:
        raise HostBudgetTooSmall(
            f"host_budget={budget}: weights, gradients, small tensors and working memory for optimizer state on the "
            f"disk stay on the host, and take {held + working} bytes ({_C.human_bytes(held + working)}): give as many",
            smallest_budget=held + working,
        )
    return spilled


def _goes(size: int) -> bool:
    return size >= _C.DISK_LEAST_BYTES


def _on_disk(size: int) -> int:
    return -(-size // _C.DISK_ALIGNMENT) * _C.DISK_ALIGNMENT
