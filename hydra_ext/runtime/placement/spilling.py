"""What of a model goes to the disk, so that the host stays within its budget.

Of as many blocks as have to the optimizer's state goes, those first that an update reaches last; then gradients; then
weights. An update reads what a block has there into working memory, ahead of the one before, and writes it behind; a
block's gradients are written when backward has left it; weights are read each time the block is fetched to the device,
the next ones while these are on their way, unless its update has just made them. What an operation outside of all that
has brought to the host goes back in the next step.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from hydra_ext.runtime.placement.host_memory import memory_limit

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostLimit:
    """What a run may hold on the host, and where the rest goes.

    Attributes:
        budget: bytes of weights, gradients and optimizer state together, and of what moves them.
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
        most, asked = memory_limit(), parse_bytes(budget, named="host_budget")
        if most is not None and asked > most:
            logger.warning(
                "host_budget=%d is more than the %s that this process may have: the latter counts, and leaves nothing "
                "for anything else",
                asked,
                _C.human_bytes(most),
            )
            asked = most
        return cls(asked, path, files)


@dataclass(frozen=True)
class BlockSizes:
    """What a block holds on the host, in bytes.

    Attributes:
        weights: all together, as they lie in a slot.
        staging: of what is made of them before they move; zero where their types stay.
        gradients: one for each parameter that is trained.
        state: of each tensor of the optimizer's.
        stays: gradients that may not go to the disk.
    """

    weights: int
    staging: int
    gradients: tuple[int, ...]
    state: tuple[int, ...]
    stays: int = 0


@dataclass(frozen=True)
class SpillPlan:
    """Blocks of which the disk has the state, the gradients, the weights; and what the host holds then.

    Attributes:
        held: bytes that stay, without working memory.
        working: bytes that an update, fills and gradients on their way take at most.
    """

    state: frozenset[int] = frozenset()
    gradients: frozenset[int] = frozenset()
    weights: frozenset[int] = frozenset()
    held: int = 0
    working: int = 0

    @property
    def total(self) -> int:
        return self.held + self.working


def choose(blocks: Sequence[BlockSizes], budget: int, *, fills: int) -> SpillPlan:
    """As little as need be: state before gradients before weights, of later blocks before earlier ones.

    Args:
        budget: bytes that the host may hold.
        fills: weights that may be on their way at once.

    Raises:
        HostBudgetTooSmall: whatever is on the disk, the host would hold more.
    """
    spilled: dict[str, set[int]] = {"state": set(), "gradients": set(), "weights": set()}
    smallest = plan = _plan(blocks, spilled, fills)
    for kind, chosen in spilled.items():
        for block in reversed(range(len(blocks))):
            if plan.total <= budget:
                return plan
            if _on_disk(blocks[block], kind):
                chosen.add(block)
                plan = _plan(blocks, spilled, fills)
                smallest = min(smallest, plan, key=lambda each: each.total)
    if plan.total <= budget:
        return plan
    raise HostBudgetTooSmall(
        f"host_budget={budget}: what is too small for the disk, and working memory for what is there, take "
        f"{_C.human_bytes(smallest.total)} on the host: give as many, or name smaller blocks=",
        needed=smallest.total,
    )


def _plan(blocks: Sequence[BlockSizes], spilled: Mapping[str, set[int]], fills: int) -> SpillPlan:
    held = sum(each.weights + sum(each.gradients) + sum(each.state) + each.stays for each in blocks)
    update = leaving = fill = 0
    for number, sizes in enumerate(blocks):
        there = {kind: _on_disk(sizes, kind) if number in chosen else 0 for kind, chosen in spilled.items()}
        held -= sum(_moved(sizes, kind) for kind, chosen in spilled.items() if number in chosen)
        if sizes.gradients or sizes.stays:  # else nothing is updated
            update = max(update, sum(there.values()))
        leaving = max(leaving, there["gradients"])
        fill = max(fill, there["weights"] + (sizes.staging if there["weights"] else 0))
    working = _C.DISK_WORKING_SETS * update + fills * fill + _GRADIENTS_UNDER_WAY * leaving
    return SpillPlan(
        state=frozenset(spilled["state"]),
        gradients=frozenset(spilled["gradients"]),
        weights=frozenset(spilled["weights"]),
        held=held,
        working=working,
    )


_GRADIENTS_UNDER_WAY = 3  # those of one block come, those before wait for it, and those before are written


def _parts(sizes: BlockSizes, kind: str) -> list[int]:
    """What is worth a transfer, in bytes."""
    return list(filter(_goes, (sizes.weights,) if kind == "weights" else getattr(sizes, kind)))


def _moved(sizes: BlockSizes, kind: str) -> int:
    """Bytes that the host holds no longer."""
    return sum(_parts(sizes, kind))


def _on_disk(sizes: BlockSizes, kind: str) -> int:
    return sum(map(_rounded, _parts(sizes, kind)))


def _goes(size: int) -> bool:
    return size >= _C.DISK_LEAST_BYTES


def _rounded(size: int) -> int:
    return -(-size // _C.DISK_ALIGNMENT) * _C.DISK_ALIGNMENT


def _expect_room(folder: Path, needed: int) -> None:
    """That all of it is free, as far as can be told now: other programs may take some of it meanwhile.

    Raises:
        SpillError: it is not.
    """
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return  # the core says why
    if free < needed:
        raise SpillError(
            f"the run takes {_C.human_bytes(needed)} in spill_dir '{folder}', where {_C.human_bytes(free)} are free: "
            "free some, name another folder, or give a larger host_budget="
        )


_PROBE_BYTES = 4 * 2**20
_SLOW = 50 * 2**20  # bytes a second, there and back


def _warn_of_a_slow_disk(folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
    """A few MiB go there and are safe: a disk on which a step takes minutes is told of before the first one."""
    begin = clock()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return  # the core says why
    speed = _PROBE_BYTES / max(clock() - begin, 1e-9)
    if speed < _SLOW:
        logger.warning(
            "spill_dir '%s' took %.1f MiB/s when it was tried, and every step moves what is there: name a folder on a "
            "faster disk, or give a larger host_budget=",
            folder,
            speed / 2**20,
        )


class Spilling:
    """Of one run.

    Args:
        layout: its blocks, which the core may not have yet.
        optimizer: None if nothing is trained; then gradients, should there be any, stay on the host and are not
            counted.
        slot_bytes: of a block, on the device.
        gradients_stay: ranks average them in the host's memory.

    Raises:
        HostBudgetTooSmall: even with all on the disk the host would hold more.
        SpillError: the folder cannot be used.
    """

    def __init__(
        self,
        core: _C.PagedModel,
        layout: Layout,
        optimizer: HostOptimizer | None,
        limit: HostLimit,
        *,
        slot_bytes: Callable[[int], int],
        gradients_stay: bool,
    ) -> None:
        self._core = core
        self._optimizer = optimizer
        self._names = [block.name for block in layout.blocks]
        self._parameters = [[parameter for _, parameter in block.parameters] for block in layout.blocks]
        state = {} if optimizer is None else optimizer.state_sizes()
        self._gradients_stay = gradients_stay
        sizes = [self._sizes(block, state, slot_bytes(block)) for block in range(len(layout.blocks))]
        self.plan = choose(sizes, limit.budget, fills=core.homes.disk.fills)
        stay = sum(each.weights for number, each in enumerate(sizes) if number not in self.plan.weights)
        self._room = limit.budget - stay
        self._block_of: dict[Tensor, int] = {
            parameter: block for block in self.plan.state for parameter in self._parameters[block]
        }
        self._backlog = max((sum(filter(_goes, sizes[block].gradients)) for block in self.plan.gradients), default=0)
        extents = [size for block in self.plan.state for size in filter(_goes, sizes[block].state)]
        extents += [size for block in self.plan.gradients for size in filter(_goes, sizes[block].gradients)]
        extents += [sizes[block].weights for block in self.plan.weights]
        if extents:  # all room now: a full disk in the middle of a step would be too late
            _expect_room(limit.folder, sum(map(_rounded, extents)))
            _warn_of_a_slow_disk(limit.folder)
            core.homes.disk.open(str(limit.folder), extents, limit.files)

    def _sizes(self, block: int, state: Mapping[Tensor, Sequence[int]], slot_bytes: int) -> BlockSizes:
        parameters = self._parameters[block]
        weights = sum(-(-each.nbytes // _C.PAGE_ALIGNMENT) * _C.PAGE_ALIGNMENT for each in parameters)
        trained = [each.nbytes for each in parameters if each.requires_grad] if self._optimizer is not None else []
        return BlockSizes(
            weights=weights,
            staging=slot_bytes if slot_bytes != weights else 0,
            gradients=() if self._gradients_stay else tuple(trained),
            state=tuple(size for each in parameters for size in state.get(each, ())),
            stays=sum(trained) if self._gradients_stay else 0,
        )

    @property
    def room_to_move_in(self) -> int:
        """Bytes of the host's that nothing has before the first step, but weights that stay."""
        return self._room

    def block_added(self, block: int) -> None:
        """The core has it: its weights go to the disk if they are to."""
        if block in self.plan.gradients:
            self._core.gradients.send_to_disk(block, self._backlog)
        if block in self.plan.weights and not self._core.moves.settle_weights_on_disk(block):
            logger.warning(
                "the weights of '%s' stay on the host, beyond host_budget=: their memory has another owner (a view, "
                "an array of numpy's, a second parameter)",
                self._names[block],
            )

    def new_state(self, parameter: Tensor, dtype: torch.dtype, *, copies: bool) -> Tensor:
        """A tensor of the optimizer's, where it belongs: zeros, or the parameter's numbers."""
        block = self._block_of.get(parameter)
        if block is not None:
            return self._core.homes.disk.make(block, parameter, dtype, copies=copies)
        return parameter.detach().to(dtype, copy=True) if copies else torch.zeros_like(parameter, dtype=dtype)

    def settle(self, blocks: Iterable[int]) -> None:
        """What was brought to the host, or made there, goes to the disk."""
        for block in blocks:
            if block in self.plan.state and self._optimizer is not None:
                parameters = self._parameters[block]
                state = [tensor for parameter in parameters for tensor in self._optimizer.tensors_beside(parameter)]
                self._core.moves.settle_state_on_disk(block, state)
            if block in self.plan.weights:
                self._core.moves.settle_weights_on_disk(block)
