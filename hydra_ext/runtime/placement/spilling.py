"""Chooses the tensors of a model whose home is the disk, so that the host stays within its budget.

Tables of which rows move go there first: a step reads and writes the rows that it needs, not the table.
Optimizer state goes to the disk first, then gradients, then weights, each for as many blocks as necessary. The blocks
that an update reaches last go first.

An update reads a block's tensors into working memory while the block before is updated, and writes them back while the
next one is. A block's gradients are written when backward has left it. Weights are read each time the block is fetched
to the device, unless its update has just made them; reads run ahead of the fetches. If an operation outside the model
brings a tensor to the host, the next step moves it back.

Saved tensors that leave the device share the budget. They get what the chosen plan leaves, and at least a small part,
which is enough to pass them on to the disk: a byte of them costs the disk as much as a byte of state, one write and one
read in a step.
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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hydra_ext import _C
from hydra_ext.blocks import Layout, Table
from hydra_ext.errors import HostBudgetTooSmall, InvalidArgument, SpillError
from hydra_ext.optim.host_optimizer import HostOptimizer
from hydra_ext.policy import parse_bytes
from hydra_ext.runtime.placement.host_memory import memory_limit

if TYPE_CHECKING:
    from hydra_ext.tables.disk_home import DiskHome

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostLimit:
    """The bytes that a run may hold on the host, and the folder for the rest.

    Attributes:
        budget: Bytes of weights, gradients, optimizer state, saved tensors and working memory together.
        folder: Existing folder on a disk of this machine.
        files: As in :class:`hydra_ext.Checks`.
    """

    budget: int
    folder: Path
    files: Any = None

    @classmethod
    def of(cls, budget: int | str | None, folder: str | os.PathLike[str] | None, files: Any = None) -> HostLimit | None:
        """The limit for ``host_budget=`` and ``spill_dir=``; None if neither is given. Creates the folder.

        Raises:
            InvalidArgument: one is given without the other.
            InvalidBudget: the budget is not a size.
            SpillError: the folder cannot be created.
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
                "host_budget=%d is more than the %s that this process may use: the run keeps to the latter, which "
                "leaves no memory for anything else",
                asked,
                _C.human_bytes(most),
            )
            asked = most
        return cls(asked, path, files)


@dataclass(frozen=True)
class BlockSizes:
    """The bytes that a block holds on the host.

    Attributes:
        weights: Bytes of all weights together, with the layout of a slot.
        staging: Bytes of the cast copy from which the weights move to the device; 0 without a cast.
        gradients: Bytes of the gradient of each trained parameter.
        state: Bytes of each tensor of the optimizer's state.
        stays: Bytes of gradients that cannot go to the disk.
    """

    weights: int
    staging: int
    gradients: tuple[int, ...]
    state: tuple[int, ...]
    stays: int = 0


@dataclass(frozen=True)
class SpillPlan:
    """The blocks that have tensors on the disk, and the bytes that the host then holds.

    Attributes:
        state: Blocks with optimizer state on the disk.
        gradients: Blocks with gradients on the disk.
        weights: Blocks with weights on the disk.
        held: Bytes that stay on the host, without working memory.
        working: Most bytes of working memory for an update, fills, and gradients on their way.
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
    """Spills as little as necessary: state before gradients before weights, of later blocks before earlier ones.

    Args:
        blocks: Sizes of the blocks.
        budget: Bytes that the host may hold.
        fills: Number of blocks whose weights may be on their way at once.

    Raises:
        HostBudgetTooSmall: the host would hold more than the budget in every plan.
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
        f"host_budget={budget}: tensors too small for the disk, and working memory for those on the disk, take "
        f"{_C.human_bytes(smallest.total)} on the host: give at least as much, or name smaller blocks=",
        needed=smallest.total,
    )


_SAVED_SHARE = 16  # the part of the budget that saved tensors get at least, but no more than helps


def _choose_beside(share: int, blocks: Sequence[BlockSizes], budget: int, *, fills: int) -> SpillPlan:
    """As :func:`choose`, with ``share`` bytes left for saved tensors, or as many as there can be."""
    try:
        return choose(blocks, budget - share, fills=fills)
    except HostBudgetTooSmall as error:
        return choose(blocks, min(error.needed, budget), fills=fills)


def _plan(blocks: Sequence[BlockSizes], spilled: Mapping[str, set[int]], fills: int) -> SpillPlan:
    held = sum(map(_whole, blocks))
    update = leaving = fill = 0
    for number, sizes in enumerate(blocks):
        there = {kind: _on_disk(sizes, kind) if number in chosen else 0 for kind, chosen in spilled.items()}
        held -= sum(_moved(sizes, kind) for kind, chosen in spilled.items() if number in chosen)
        if sizes.gradients or sizes.stays:  # only blocks with gradients are updated
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


_STEPS_MADE_BYTES = 4  # of each row of a table: how many steps it has made
_GRADIENTS_UNDER_WAY = 3  # one block's gradients arrive, another's wait, and a third's are written


def _whole(sizes: BlockSizes) -> int:
    return sizes.weights + sum(sizes.gradients) + sum(sizes.state) + sizes.stays


def _parts(sizes: BlockSizes, kind: str) -> list[int]:
    """The sizes of the tensors that are large enough for the disk, in bytes."""
    return list(filter(_goes, (sizes.weights,) if kind == "weights" else getattr(sizes, kind)))


def _moved(sizes: BlockSizes, kind: str) -> int:
    """Bytes that leave the host."""
    return sum(_parts(sizes, kind))


def _on_disk(sizes: BlockSizes, kind: str) -> int:
    return sum(map(_rounded, _parts(sizes, kind)))


def _goes(size: int) -> bool:
    return size >= _C.DISK_LEAST_BYTES


def _rounded(size: int) -> int:
    return -(-size // _C.DISK_ALIGNMENT) * _C.DISK_ALIGNMENT


def _expect_room(folder: Path, needed: int) -> None:
    """Checks that the folder's disk has enough free bytes now. Other programs may use some of them later.

    Raises:
        SpillError: it has not.
    """
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return  # the core reports the error when it opens its files
    if free < needed:
        raise SpillError(
            f"the run takes {_C.human_bytes(needed)} in spill_dir '{folder}', where {_C.human_bytes(free)} are free: "
            "free some space, name another folder, or give a larger host_budget="
        )


_PROBE_BYTES = 4 * 2**20
_SLOW = 50 * 2**20  # bytes written per second


def _warn_of_a_slow_disk(folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
    """Writes and syncs a few MiB, and warns before the first step if the disk would make each one take minutes."""
    begin = clock()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return  # the core reports the error when it opens its files
    speed = _PROBE_BYTES / max(clock() - begin, 1e-9)
    if speed < _SLOW:
        logger.warning(
            "spill_dir '%s' took %.1f MiB/s when it was tried, and every step moves all data that is there: name a "
            "folder on a faster disk, or give a larger host_budget=",
            folder,
            speed / 2**20,
        )


def tables_to_spill(sizes: Sequence[int], over: int) -> list[int]:
    """The tables that go to the disk, the largest ones first, since a step needs few rows of each.

    Args:
        sizes: Bytes of each table with its state.
        over: Bytes by which the host would hold more than its budget if all stayed.
    """
    chosen: list[int] = []
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        if over <= 0:
            break
        if sizes[number] >= _C.DISK_LEAST_BYTES:
            chosen.append(number)
            over -= sizes[number]
    return chosen


class Spilling:
    """Moves tensors of one run to the disk, by a :class:`SpillPlan`.

    Attributes:
        tables: Weights of which rows move and whose home is the disk, and where they are there.

    Args:
        core: Core of the model, to which the blocks may not have been added yet.
        layout: Blocks of the model.
        optimizer: Optimizer of the run, or None; then any gradients stay on the host and are not counted.
        limit: Budget and folder.
        slot_bytes: Function that gives the bytes of a block's slot on the device.
        gradients_stay: Whether gradients stay on the host, because ranks average them there.
        saved_leave: Whether saved tensors may leave the device.

    Raises:
        HostBudgetTooSmall: the host would hold more than its budget in every plan.
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
        saved_leave: bool,
    ) -> None:
        self._core = core
        self._limit = limit
        self._optimizer = optimizer
        self._names = [block.name for block in layout.blocks]
        self._parameters = [[parameter for _, parameter in block.parameters] for block in layout.blocks]
        state = {} if optimizer is None else optimizer.state_sizes()
        self._gradients_stay = gradients_stay
        sizes = [self._sizes(block, state, slot_bytes(block)) for block in range(len(layout.blocks))]
        share = min(limit.budget // _SAVED_SHARE, _C.STASH_WORKING_BYTES) if saved_leave else 0
        held = self._take_tables(layout.tables, state, sum(map(_whole, sizes)) + share)
        sizes.append(BlockSizes(weights=0, staging=0, gradients=(), state=(), stays=held))
        self.plan = _choose_beside(share, sizes, limit.budget, fills=core.homes.disk.fills)
        stay = held + sum(each.weights for number, each in enumerate(sizes) if number not in self.plan.weights)
        self._room = limit.budget - stay
        self._block_of: dict[Tensor, int] = {
            parameter: block for block in self.plan.state for parameter in self._parameters[block]
        }
        self._backlog = max((sum(filter(_goes, sizes[block].gradients)) for block in self.plan.gradients), default=0)
        extents = [size for block in self.plan.state for size in filter(_goes, sizes[block].state)]
        extents += [size for block in self.plan.gradients for size in filter(_goes, sizes[block].gradients)]
        extents += [sizes[block].weights for block in self.plan.weights]
        if extents:  # reserves all room now, since a full disk in the middle of a step could not be handled
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

    def _take_tables(self, tables: Sequence[Table], state: Mapping[Tensor, Sequence[int]], others: int) -> int:
        """Makes room on the disk for tables that leave the host. Returns the bytes that tables keep there.

        Args:
            others: Bytes of all else.
        """
        self.tables: dict[nn.Parameter, DiskHome] = {}
        if not tables:
            return 0
        from hydra_ext.tables.disk_home import DiskHome

        trained = [state.get(table.weight, ()) if table.weight.requires_grad else () for table in tables]
        sizes = [table.weight.nbytes + sum(beside) for table, beside in zip(tables, trained, strict=True)]
        chosen = tables_to_spill(sizes, sum(sizes) + others - self._limit.budget)
        _expect_room(self._limit.folder, sum(sizes[number] for number in chosen))
        for number in chosen:
            weight, tensors = tables[number].weight, 1 + len(trained[number])
            self.tables[weight] = DiskHome(weight, tensors, str(self._limit.folder), self._limit.files)
            sizes[number] = len(weight) * (_C.ROW_NOTES_BYTES * tensors + _STEPS_MADE_BYTES)
        return sum(sizes)

    def table_filled(self, weight: nn.Parameter) -> None:
        """Called when a table has its numbers: moves them to the disk if that is its home."""
        if weight in self.tables:
            self.tables[weight].leave(weight, strict=True)

    def bring_tables_home(self) -> None:
        for home in self.tables.values():
            home.close()

    def overwrite_table(self, tensor: Tensor) -> None:
        """Called before a tensor of a checkpoint is written to one of the model, whatever has become of that."""
        for weight, home in self.tables.items():
            if weight is tensor:
                home.overwrite(tensor)

    def send_tables(self) -> None:
        """Moves what a checkpoint was read into back to the disk."""
        for weight, home in self.tables.items():
            beside = [] if self._optimizer is None else self._optimizer.tensors_beside(weight)
            home.leave(weight, *beside, strict=False)

    def copy_of_table(self, tensor: Tensor) -> Tensor | None:
        """A copy of a weight or a moment that is on the disk by rows; None if it is not."""
        copies = (home.copy(tensor) for home in self.tables.values() if home.is_away(tensor))
        return next(copies, None)

    @property
    def budget(self) -> int:
        """The bytes that the host may hold."""
        return self._limit.budget

    @property
    def saved_room(self) -> int:
        """Host bytes for saved tensors that have left the device."""
        return self._limit.budget - self.plan.total

    def limit(self, stash: _C.Stash) -> None:
        """Gives the stash its part of the host, and the folder for the rest."""
        if self.saved_room < _C.STASH_LEAST_BYTES:
            logger.warning(
                "host_budget=%d leaves %d bytes for saved tensors, which need %d on their way to the disk: what does "
                "not fit there stays on the device; give %d bytes or more",
                self._limit.budget,
                self.saved_room,
                _C.STASH_LEAST_BYTES,
                self._limit.budget + _C.STASH_LEAST_BYTES - self.saved_room,
            )
        stash.limit_host(self.saved_room, str(self._limit.folder), self._limit.files)

    @property
    def room_to_move_in(self) -> int:
        """Bytes of the host budget beside the weights that stay; before the first step nothing else uses them."""
        return self._room

    def block_added(self, block: int) -> None:
        """Called when the core has the block: moves its weights to the disk if the plan says so."""
        if block in self.plan.gradients:
            self._core.gradients.send_to_disk(block, self._backlog)
        if block in self.plan.weights and not self._core.moves.settle_weights_on_disk(block):
            logger.warning(
                "the weights of '%s' stay on the host, beyond host_budget=: their memory has another owner (a view, "
                "a numpy array, a second parameter)",
                self._names[block],
            )

    def new_state(self, parameter: Tensor, dtype: torch.dtype, *, copies: bool) -> Tensor:
        """Makes a tensor of optimizer state at its home: the parameter's numbers if ``copies``, else zeros."""
        block = self._block_of.get(parameter)
        if block is not None:
            return self._core.homes.disk.make(block, parameter, dtype, copies=copies)
        return parameter.detach().to(dtype, copy=True) if copies else torch.zeros_like(parameter, dtype=dtype)

    def settle(self, blocks: Iterable[int]) -> None:
        """Moves tensors that were brought to the host, or made there, back to the disk, as the plan says."""
        for block in blocks:
            if block in self.plan.state and self._optimizer is not None:
                parameters = self._parameters[block]
                state = [tensor for parameter in parameters for tensor in self._optimizer.tensors_beside(parameter)]
                self._core.moves.settle_state_on_disk(block, state)
            if block in self.plan.weights:
                self._core.moves.settle_weights_on_disk(block)
