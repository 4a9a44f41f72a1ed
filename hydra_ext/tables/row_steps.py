"""Steps of a native optimizer that change only the rows with a gradient, and catch up on the others when they are read.

A dense gradient is zero for rows that were not looked up, and yet a step changes them: by weight decay, and by their
moments. So each step is noted. A row makes the steps that it has missed, one by one and with a gradient of zero, before
it is looked up, gets a gradient, or anything else reads the table. The kernels work element by element. So the bits are
those of steps of the whole table.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hydra_ext import _C
from hydra_ext.optim.rows import RowStep
from hydra_ext.tables import watching
from hydra_ext.tables.disk_home import DiskHome

_MOST_BEHIND = 64  # steps; then the whole table catches up


class RowSteps:
    """The steps of one table. One thread at a time is inside.

    Args:
        weight: The table, which is watched while these steps are made.
        disk: Where the table and its moments are at home; None if it is the host.

    Attributes:
        caught_up: Number of times that the whole table has caught up.
    """

    def __init__(self, weight: nn.Parameter, disk: DiskHome | None = None) -> None:
        self.caught_up = 0
        self._weight = weight
        self._disk = disk
        if disk is not None:
            disk.settle, disk.forget = self.settle, self._forget
        self._lock = threading.RLock()
        self._made = torch.zeros(len(weight), dtype=torch.int32, device="cpu")  # steps that each row has made
        self._missed = _Missed(0, ())
        self._pool: _C.ThreadPool | None = None
        self._tensors: tuple[Tensor, ...] = ()  # the table and its moments, while rows are behind
        self._watch(weight)

    def step(self, step: RowStep, rows: Tensor, values: Tensor, pool: _C.ThreadPool) -> None:
        """Makes a step. ``values`` is the gradient of these rows, each once; that of all others is zero."""
        tensors = (self._weight, *step.moments)
        with self._inside():
            if not _are_same(tensors, self._tensors):
                self.settle()
            missed = self._missed
            if not step.resting or step.moments:  # else no other row changes
                self._pool = pool
                self._use(tensors)
                missed = missed.and_then(step)
            with self._on_host(tensors, rows) as (there, places, made):
                self._make_missed(there, places, made)
                _C.step_rows(there, places, made, step.scalars, values.contiguous(), missed.end, pool)
            self._missed = missed  # now, so that rows that could not be read have not missed it
            if len(self._missed.steps) == _MOST_BEHIND or not all(map(self._is_alone, self._tensors)):
                self.settle()
            if self._disk is not None:
                self._disk.leave(*tensors, strict=False)

    def _is_alone(self, tensor: Tensor) -> bool:
        return (self._disk is not None and self._disk.is_away(tensor)) or watching.is_alone(tensor)

    def new_moment(self) -> Tensor:
        """A moment of zeros, at home where the table is."""
        with self._inside():
            return torch.zeros_like(self._weight) if self._disk is None else self._disk.new(self._weight)

    def catch_up(self, rows: Tensor) -> None:
        """Brings rows, each named once, up to date."""
        with self._inside():
            if self._missed.steps:
                rows = rows if self._disk is None else self._due(self._disk, rows)
                with self._on_host(self._tensors, rows) as (there, places, made):
                    self._make_missed(there, places, made)

    def take(self, rows: Tensor, to: Tensor) -> None:
        """Copies rows of the table, each named once, as they are when they are up to date.

        On the disk they stay as they were: a row that is stepped afterwards would be written twice.
        """
        with self._inside():
            if self._disk is None:
                self.catch_up(rows)
                torch.index_select(self._weight.detach(), 0, rows, out=to)
                return
            self._disk.rows(self._weight, rows, to)
            due = torch.isin(rows, self._due(self._disk, rows), assume_unique=True) if self._missed.steps else None
            if due is None or not bool(due.any()):
                return
            there = [to[due], *(self._disk.rows(moment, rows[due]) for moment in self._tensors[1:])]
            self._make_missed(there, torch.arange(len(there[0]), device="cpu"), self._made[rows[due]])
            to[due] = there[0]

    def _make_missed(self, there: list[Tensor], places: Tensor, made: Tensor) -> None:
        if self._missed.steps and self._pool is not None:
            _C.catch_up_rows(there, places, made, self._missed.first, list(self._missed.steps), self._pool)

    def _due(self, disk: DiskHome, rows: Tensor) -> Tensor:
        """Those of the rows that have missed a step which changes them: only these are read and written."""
        rows = rows[self._made[rows] != self._missed.end]
        if all(resting for _, resting in self._missed.steps):
            at_rest = torch.ones(len(rows), dtype=torch.bool, device="cpu")
            for moment in self._tensors[1:]:
                at_rest &= disk.blank(moment, rows)
            self._made[rows[at_rest]] = self._missed.end
            rows = rows[~at_rest]
        return rows

    def come_home(self) -> None:
        """Brings all rows up to date, and the table and its moments to the host."""
        self.settle()
        if self._disk is not None:
            self._disk.come()

    def settle(self) -> None:
        """Brings all rows up to date."""
        with self._inside():
            if self._missed.steps:
                self.caught_up += 1
                for rows in (
                    [torch.arange(len(self._made), device="cpu")] if self._disk is None else self._disk.chunks()
                ):
                    self.catch_up(rows)
                self._missed = _Missed(self._missed.end, ())
            self._use(())

    def _forget(self) -> None:
        """Drops what rows have missed: all of them are about to be written."""
        with self._inside():
            self._missed = _Missed(self._missed.end, ())
            self._made.fill_(self._missed.end)
            self._use(())

    def _use(self, tensors: tuple[Tensor, ...]) -> None:
        """Notes the table and its moments, of which rows may be behind from now on, or forgets them."""
        if not _are_same(tensors, self._tensors):
            before, self._tensors = self._tensors, tensors
            for moment in before[1:] if self._disk is None else ():
                watching.unwatch(moment)
            for moment in tensors[1:]:
                self._watch(moment)

    def _watch(self, tensor: Tensor) -> None:
        if self._disk is None:
            watching.watch(tensor, self.settle)
        else:
            self._disk.watch(tensor)

    @contextmanager
    def _on_host(self, tensors: Sequence[Tensor], rows: Tensor) -> Iterator[tuple[list[Tensor], Tensor, Tensor]]:
        """Tensors that have these rows on the host, their numbers there, and how many steps each row has made.

        Behind it what was written there is at home.
        """
        if self._disk is None:
            yield list(tensors), rows, self._made
            return
        there = [self._disk.rows(tensor, rows) for tensor in tensors]
        made = self._made[rows]
        yield there, torch.arange(len(rows), device="cpu"), made
        self._disk.put_step(tensors, rows, there, self._made, made)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        with self._lock, torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), _C.Uncharged():
            yield


@dataclass(frozen=True)
class _Missed:
    """Steps that some rows have not made.

    Attributes:
        first: Number of steps before them, which all rows have made.
        steps: The rule's numbers of each, and whether a row at rest does not change.
    """

    first: int
    steps: tuple[tuple[_C.AdamStep | _C.SgdStep, bool], ...]

    @property
    def end(self) -> int:
        return self.first + len(self.steps)

    def and_then(self, step: RowStep) -> _Missed:
        return replace(self, steps=(*self.steps, (step.scalars, step.resting)))


def _are_same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))
