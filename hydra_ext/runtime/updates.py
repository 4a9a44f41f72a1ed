"""Optimizer steps that run behind the next forward: each block is updated just ahead of its use.

Only the native optimizers (:mod:`hydra_ext.optim`) defer their steps. ``step()`` prepares the step, and threads of the
core run it, in the order of the last forward. Until a block is updated, its parameters, gradients and optimizer state
have no bytes: operations on them wait, and raw access raises. ``state_dict()`` of the model and of the optimizer wait
for the whole step, as do copies and pickles of them.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hydra_ext import _C
from hydra_ext.blocks import Layout
from hydra_ext.optim import clip, rows
from hydra_ext.optim.host_optimizer import HostOptimizer, PreparedStep
from hydra_ext.runtime.placement.homes import Homes
from hydra_ext.runtime.placement.spilling import Spilling

if TYPE_CHECKING:
    from hydra_ext.tables.lookup import TableRows
    from hydra_ext.tables.row_steps import RowSteps

logger = logging.getLogger(__name__)

Gradients = list[tuple[Tensor, Tensor]]
_NO_BLOCK = -1  # the block number of parameters outside the model


class UpdateOwner(Protocol):
    """The run whose model is updated."""

    core: _C.PagedModel
    layout: Layout
    tables: Sequence[TableRows]

    def sync(self) -> None: ...


class Updates:
    """The steps of one optimizer for one model. It is the optimizer's runner from :meth:`__init__` to :meth:`close`.

    Attributes:
        homes: Blocks that are updated on the device.
    """

    destinations: Mapping[Tensor, Tensor] | None = None  # steps update parameters in place

    def __init__(self, owner: UpdateOwner, optimizer: HostOptimizer, homes: Homes, spilling: Spilling | None) -> None:
        self._owner: UpdateOwner = weakref.proxy(owner)  # a reference would be a cycle: the owner refers to this object
        self._core = owner.core
        self._optimizer = optimizer
        self._blocks = len(owner.layout.blocks)
        self.homes = homes
        self._spilling = spilling
        self._block_of: dict[Tensor, int] = {
            parameter: index for index, block in enumerate(owner.layout.blocks) for _, parameter in block.parameters
        }
        self._tables: dict[Tensor, RowSteps | None] = {table.host: table.steps for table in owner.tables}
        self._rows: list[Tensor] = []  # parameters with a gradient by rows, of the step being prepared
        self._parts: list[list[int]] = []  # blocks of each part of the step being prepared
        self._outside_overlaps = False  # whether parameters outside the model overlap with its blocks
        self._scale = 1.0  # factor for the gradients of the model's own parameters
        if optimizer.runner is not None:
            optimizer.runner.sync()
        optimizer.runner = self

    def close(self) -> None:
        try:
            self.sync()
        finally:
            if self._optimizer.runner is self:  # another context with this optimizer may have replaced it
                self._optimizer.runner = None

    def sync(self) -> None:
        """Waits for a step under way, and brings all bytes back to the host, as :meth:`hydra_ext.Run.sync`."""
        self._owner.sync()

    def expect_last_gradients(self) -> None:
        """Declares that gradients from now on are the step's final ones: their squares are summed on arrival.

        Later writes through torch's operations are detected. Other writers have to call ``gradients.norm.forget()``.
        """
        self._core.gradients.norm.begin(self._optimizer.pool)

    def step_ended(self) -> None:
        """Stops summing squares, whether or not the step succeeded."""
        self._core.gradients.norm.end()

    def step(self, parameters: Sequence[Tensor], max_norm: float | None) -> tuple[Tensor | None, bool]:
        """Clips the gradients of the model's ``parameters`` together and makes a step.

        The updated parameters have the same bits as after ``clip_grad_norm_`` and ``optimizer.step()``. Unlike there,
        the update itself scales the gradients, and a norm that is not finite skips the step before any write.

        Returns:
            The norm, None without ``max_norm``; and whether the step was skipped.
        """
        if max_norm is None:
            self._optimizer.step()
            return None, False
        known = self._core.gradients.norm.take(list(parameters))
        norm, factor = clip.combined(clip.sums_of_squares(parameters, known), max_norm)
        if not math.isfinite(norm):
            logger.warning("the norm of the gradients is %s: this step is skipped", norm)
            return torch.tensor(norm, dtype=torch.float32, device="cpu"), True
        stepped = {parameter for group in self._optimizer.param_groups for parameter in group["params"]}
        for parameter in parameters:
            if parameter not in stepped and factor != 1.0:
                clip.scale_gradient(parameter, factor)
        self._scale = factor
        try:
            self._optimizer.step()
        finally:
            self._scale = 1.0
        return torch.tensor(norm, dtype=torch.float32, device="cpu"), False

    # ---- called by the optimizer ------------------------------------------------------------------------------------

    def parts(self, gradients: Gradients) -> list[Gradients]:
        """Splits gradients by block, in the order in which the last forward used the blocks.

        Blocks whose weights overlap are one part. Parameters outside the model are one part too, joined with the blocks
        that one of them overlaps. Waits for the previous step.
        """
        self._core.update.finish()
        gradients = self._take_rows(gradients)
        used = [block for block, _ in self._core.pager.recorded(_C.PassKind.FORWARD)]
        order = dict.fromkeys([*used, *range(self._blocks), _NO_BLOCK])
        outside = [parameter for parameter, _ in gradients if parameter not in self._block_of]
        together = self._together(list(order), outside)
        by_block: dict[int, Gradients] = {block: [] for block in order}
        members: dict[int, Gradients] = {first: [] for first in together}
        first_of = {block: first for first, blocks in together.items() for block in blocks}
        for parameter, gradient in gradients:
            block = self._block_of.get(parameter, _NO_BLOCK)
            by_block[block].append((parameter, gradient))
            members[first_of[block]].append((parameter, gradient))
        self.homes.expect_step(by_block)
        stepped = [first for first in together if members[first]]
        self._parts = [[block for block in together[first] if by_block[block]] for first in stepped]
        self._outside_overlaps = any(_NO_BLOCK in blocks and len(blocks) > 1 for blocks in together.values())
        return [members[first] for first in stepped]

    def _take_rows(self, gradients: Gradients) -> Gradients:
        """Keeps the gradients by rows of this run's tables for :meth:`run`. Returns the others."""
        self._rows, others = [], []
        for parameter, gradient in gradients:
            if self._tables.get(parameter) is not None and rows.has_rows(parameter):
                self._rows.append(parameter)
            else:
                others.append((parameter, gradient))
        return others

    def _together(self, order: list[int], outside: list[Tensor]) -> dict[int, list[int]]:
        """Groups of blocks that are updated as one, by the first block of each; both are in this order."""
        group_of = {block: {block} for block in order}
        for blocks in self._core.blocks.overlapping(outside):
            joined = set().union(*(group_of[block] for block in blocks))
            group_of.update(dict.fromkeys(joined, joined))
        together: dict[int, list[int]] = {}
        first_of: dict[int, int] = {}
        for block in order:
            first = first_of.setdefault(min(group_of[block]), block)
            together.setdefault(first, []).append(block)
        return together

    def new_state(self, parameter: Tensor, dtype: torch.dtype, *, copies: bool) -> Tensor:
        steps = self._tables.get(parameter)
        if steps is not None and any(stepped is parameter for stepped in self._rows):
            return steps.new_moment()
        if self._spilling is not None:
            return self._spilling.new_state(parameter, dtype, copies=copies)
        return parameter.to(dtype, copy=True) if copies else torch.zeros_like(parameter, dtype=dtype)

    def run(self, optimizer: HostOptimizer, prepared: list[PreparedStep]) -> None:
        """Starts the prepared step; parameters outside the model, and blocks they overlap, are updated immediately."""
        if self._spilling is not None:
            self._spilling.settle(block for blocks in self._parts if len(blocks) == 1 for block in blocks)
        for blocks in self._parts:
            if len(blocks) > 1:
                for block in blocks:
                    if block != _NO_BLOCK:
                        self._core.moves.bring_home(block)
        settled = set(self._core.homes.on_device)
        later: list[_C.BlockUpdate] = []
        at_home: list[_C.BlockUpdate] = []
        for blocks, part in zip(self._parts, prepared, strict=True):
            optimizer.finish(part)
            if _NO_BLOCK in blocks:
                self._run_outside(optimizer, part)
            else:
                update = _C.BlockUpdate(blocks, part.plan, optimizer.tensors_of(part))
                (later if settled.isdisjoint(blocks) else at_home).append(update)
        if later:
            self._core.update.defer(later, optimizer.pool, self._scale)
        for update in at_home:
            self._core.moves.update(update, optimizer.pool, self._scale)
        for parameter in self._rows:
            numbers, values = rows.rows_of(parameter)
            if self._scale != 1.0:
                _C.scale_gradient(values, self._scale)
            if (steps := self._tables[parameter]) is not None:
                steps.step(optimizer.row_step(parameter), numbers, values, optimizer.pool)
        increment_version(self._rows)
        self._rows = []
        self.homes.end_step()

    def _run_outside(self, optimizer: HostOptimizer, part: PreparedStep) -> None:
        if self._scale != 1.0:
            for parameter, gradient in zip(part.parameters, part.gradients, strict=True):
                if parameter in self._block_of or parameter in self._tables:
                    _C.scale_gradient(gradient, self._scale)
        part.plan.run(optimizer.pool)
        if self._outside_overlaps:
            self._core.changes.refresh()  # writes through other tensors do not count in the parameters' versions
