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

import torch
from torch import Tensor, nn

from hydra_ext import _C
from hydra_ext.optim.rows import RowStep
from hydra_ext.tables import watching

_MOST_BEHIND = 64  # steps; then the whole table catches up
_ROWS_AT_ONCE = 1 << 12  # of a table that catches up: their numbers stay in a core's cache


class RowSteps:
    """The steps of one table. One thread at a time is inside.

    Args:
        weight: The table. :func:`watching.can_be_watched` holds for it.

    Attributes:
        caught_up: Number of times that the whole table has caught up.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        self.caught_up = 0
        self._weight = weight
        self._lock = threading.RLock()
        self._missed: list[RowStep] = []  # steps that some rows have not made
        self._made = torch.zeros(len(weight), dtype=torch.int64, device="cpu")  # how many of them each row has made
        self._pool: _C.ThreadPool | None = None
        self._watched: tuple[Tensor, ...] = ()
        self._unfinished: tuple[_Part, Tensor, int] | None = None

    def step(self, step: RowStep, rows: Tensor, values: Tensor, pool: _C.ThreadPool) -> None:
        """Makes a step. ``values`` is the gradient of these rows, each once; that of all others is zero."""
        with self._inside():
            if self._missed and not _are_same(self._missed[-1].moments, step.moments):
                self.settle()
            self._pool = pool
            self.catch_up(rows)
            part = _Part(self._weight, step.moments, rows)
            part.run(step.scalars, values, len(rows), pool)
            if not step.resting or step.moments:  # else no other row changes
                self._missed.append(step)
            self._put_back(part, rows)
            if not self._missed:
                return
            tensors = (self._weight, *step.moments)
            self._watch(tensors)
            if len(self._missed) == _MOST_BEHIND or not all(map(watching.is_alone, tensors)):
                self.settle()

    def catch_up(self, rows: Tensor) -> None:
        """Brings rows, each named once, up to date."""
        with self._inside():
            self._catch_up(rows[self._made[rows] < len(self._missed)])

    def settle(self) -> None:
        """Brings all rows up to date."""
        with self._inside():
            if not self._missed:
                return
            self.caught_up += 1
            behind = (self._made < len(self._missed)).nonzero().squeeze(1)
            for rows in torch.split(behind, _ROWS_AT_ONCE):
                self._catch_up(rows)
            self._missed.clear()
            self._made.zero_()
            self._watch(())

    def _catch_up(self, rows: Tensor) -> None:
        if len(rows) == 0 or self._pool is None:
            return
        end, moments = len(self._missed), self._missed[-1].moments
        if all(step.resting for step in self._missed):
            moving = torch.stack([moment[rows].view(torch.int32).any(dim=1) for moment in moments]).any(dim=0)
            self._made[rows[~moving]] = end
            rows = rows[moving]
            if len(rows) == 0:
                return
        made = self._made[rows]
        made, order = made.sort()
        part = _Part(self._weight, moments, rows[order])
        zeros = torch.zeros_like(part.weights)
        first = int(made[0])
        counts = torch.searchsorted(made, torch.arange(first, end, device="cpu"), right=True).tolist()
        for step, count in zip(self._missed[first:], counts, strict=True):
            part.run(step.scalars, zeros, count, self._pool)
        self._put_back(part, part.rows)

    def _put_back(self, part: _Part, rows: Tensor) -> None:
        """Writes rows that have made all steps. If an interrupt ends this, the next call from outside repeats it."""
        self._unfinished = part, rows, len(self._missed)
        self._finish()

    def _finish(self) -> None:
        if self._unfinished is not None:
            part, rows, made = self._unfinished
            part.put_back()
            self._made[rows] = made
            self._unfinished = None

    @contextmanager
    def _inside(self) -> Iterator[None]:
        alone, unwatched, host = torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), _C.Uncharged()
        with self._lock, alone, unwatched, host:
            self._finish()
            yield

    def _watch(self, tensors: tuple[Tensor, ...]) -> None:
        if _are_same(tensors, self._watched):
            return
        for tensor in self._watched:
            watching.unwatch(tensor)
        for tensor in tensors:
            watching.watch(tensor, self.settle)
        self._watched = tensors


class _Part:
    """Some rows of a table and of its moments, gathered."""

    def __init__(self, table: Tensor, moments: Sequence[Tensor], rows: Tensor) -> None:
        self._tensors = (table, *moments)
        self.rows = rows
        self._parts = [tensor.index_select(0, rows) for tensor in self._tensors]

    @property
    def weights(self) -> Tensor:
        return self._parts[0]

    def run(self, scalars: _C.AdamStep | _C.SgdStep, gradient: Tensor, count: int, pool: _C.ThreadPool) -> None:
        """Makes a step of the first ``count`` rows."""
        weights, *moments = (part[:count] for part in self._parts)
        first, second = (*moments, None, None)[:2]
        plan = _C.TensorPlan()
        plan.add(scalars, weights, gradient[:count], first_moment=first, second_moment=second)
        plan.run(pool)

    def put_back(self) -> None:
        for tensor, part in zip(self._tensors, self._parts, strict=True):
            tensor.index_copy_(0, self.rows, part)


def _are_same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))
