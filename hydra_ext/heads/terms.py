"""Matrices of a loss that are computed in parts, whenever an operator needs one.

A row of logits, of their log-softmax and of their gradient depends on one row of hidden states. A column of logits
depends on one row of the head's weight. So each product that backward makes of the gradient is computed in parts whose
sums run over all that the plain one sums over: the hidden states' gradient in rows, the weight's in columns.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hydra_ext import _C
from hydra_ext.errors import StateError

_aten: Any = torch.ops.aten

_ROW_SHARE, _COLUMN_SHARE = 8, 16  # of the weight's bytes: one part of a matrix. Beside the latter is its gradient.
_ROWS, _COLUMNS = 16, 64  # of which kernels take multiples; parts have at least these


@dataclass(frozen=True)
class Parts:
    """The sizes of parts: rows of one, and columns of one."""

    rows: int
    columns: int

    @classmethod
    def of(cls, rows: int, columns: int, weight_bytes: int, itemsize: int) -> Parts:
        """For a matrix of this size, from a weight of these bytes."""
        at_once = weight_bytes // _ROW_SHARE // (columns * itemsize)
        beside = weight_bytes // _COLUMN_SHARE // (rows * itemsize)
        return cls(max(_ROWS, at_once // _ROWS * _ROWS), max(_COLUMNS, beside // _COLUMNS * _COLUMNS))


@dataclass
class Tally:
    """Products of a head: those of a part of it, and those of all of it at once."""

    parts: int = 0
    wholes: int = 0


class Term(ABC):
    """A matrix with a row for each row of hidden states, and a column for each class.

    Attributes:
        size: Rows and columns.
        dtype: Of its elements.
        parts: How it is cut.
        is_shared: Whether others have its memory, and may write to it unseen. Nothing that is made of it stays unmade.
    """

    def __init__(self, size: tuple[int, int], dtype: torch.dtype, parts: Parts) -> None:
        self.size = size
        self.dtype = dtype
        self.parts = parts
        self.is_shared = False
        self._made: Tensor | None = None
        self._users: weakref.WeakSet[Term] = weakref.WeakSet()

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    def is_of_backward(self) -> bool:
        """Whether its products in parts were compared with plain ones: other products may have other bits."""
        return False

    @abstractmethod
    def _rows(self, at: slice) -> Tensor: ...

    @abstractmethod
    def _columns(self, at: slice) -> Tensor: ...

    @abstractmethod
    def _make(self) -> Tensor:
        """All of it, by plain PyTorch's operator."""

    def rows(self, at: slice) -> Tensor:
        return self._rows(at) if self._made is None else self._made[at]

    def columns(self, at: slice) -> Tensor:
        return self._columns(at) if self._made is None else self._made[:, at]

    def whole(self) -> Tensor:
        """All of it, which stays as long as the term."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def before_write(self) -> None:
        """What others have made of it does not see a write to it."""
        for user in list(self._users):
            user.whole()

    def share(self) -> None:
        """Others get its memory. What they write there, terms that were made of it before do not see."""
        self.before_write()
        self.is_shared = True

    def row_parts(self) -> Iterator[slice]:
        return _cut(self.size[0], self.parts.rows)

    def column_parts(self) -> Iterator[slice]:
        return _cut(self.size[1], self.parts.columns)


class Logits(Term):
    """A linear layer's output.

    Args:
        hidden: Rows of hidden states.
        weight: The layer's weight, transposed.
        tally: Counts the products.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, parts: Parts, tally: Tally | None = None
    ) -> None:
        super().__init__((hidden.size(0), weight.size(1)), hidden.dtype, parts)
        self._hidden = hidden
        self._weight = weight
        self._bias = bias
        self._tally = tally or Tally()
        self._versions = self._versions_now()

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    def _versions_now(self) -> list[int]:
        given = (self._hidden, self._weight, self._bias)
        return [tensor._version for tensor in given if tensor is not None and not tensor.is_inference()]

    def _product(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._versions_now() != self._versions:
            raise StateError(
                "a head's logits, which are computed in rows when they are needed, were needed after its weight or its "
                "input had been written to: use logits before optimizer.step(), or give more budget="
            )
        with _C.Faulting():  # the layer's block may have made room since
            return torch.mm(hidden, weight) if bias is None else torch.addmm(bias, hidden, weight)

    def _rows(self, at: slice) -> Tensor:
        self._tally.parts += 1
        return self._product(self._hidden[at], self._weight, self._bias)

    def _columns(self, at: slice) -> Tensor:
        self._tally.parts += 1
        return self._product(self._hidden, self._weight[:, at], None if self._bias is None else self._bias[at])

    def _make(self) -> Tensor:
        self._tally.wholes += 1
        return self._product(self._hidden, self._weight, self._bias)


class _Of(Term):
    """What one operator makes of another term."""

    def __init__(self, source: Term, dtype: torch.dtype) -> None:
        super().__init__(source.size, dtype, source.parts)
        self._source = source
        source._users.add(self)

    @property
    def device(self) -> torch.device:
        return self._source.device


class Cast(_Of):
    """The same numbers in another dtype."""

    @property
    def is_of_backward(self) -> bool:
        return self._source.is_of_backward

    def _rows(self, at: slice) -> Tensor:
        return self._source.rows(at).to(self.dtype)

    def _columns(self, at: slice) -> Tensor:
        return self._source.columns(at).to(self.dtype)

    def _make(self) -> Tensor:
        return self._source.whole().to(self.dtype)


class LogSoftmax(_Of):
    """The logarithm of the probability of each class."""

    def __init__(self, source: Term) -> None:
        super().__init__(source, source.dtype)
        # Of each row: the greatest logit, and the logarithm of the sum of exponentials beside it.
        self._most = torch.empty(source.size[0], 1, dtype=source.dtype, device=source.device)
        self._sums = torch.empty_like(self._most)
        self._all_noted = False

    def _rows(self, at: slice) -> Tensor:
        logits = self._source.rows(at)
        made: Tensor = _aten._log_softmax(logits, 1, False)
        torch.amax(logits, 1, keepdim=True, out=self._most[at])
        self._sums[at] = made.amax(1, keepdim=True).neg_()
        return made

    def _columns(self, at: slice) -> Tensor:
        if not self._all_noted:
            for rows in self.row_parts():
                self.rows(rows)
            self._all_noted = True
        return self._source.columns(at).sub(self._most).sub_(self._sums)

    def _make(self) -> Tensor:
        made: Tensor = _aten._log_softmax(self._source.whole(), 1, False)
        return made

    def of_classes(self, classes: Tensor) -> Tensor:
        """One column: of each row the number of its class."""
        picked = torch.empty_like(self._most)
        for at in self.row_parts():
            picked[at] = self.rows(at).gather(1, classes[at])
        self._all_noted = True
        return picked


class OneOfEach(Term):
    """Zeros, but for one number in each row.

    Args:
        numbers: One column.
        classes: One column: the places of the numbers.
        columns: Of the matrix.
    """

    def __init__(self, numbers: Tensor, classes: Tensor, columns: int, parts: Parts) -> None:
        super().__init__((numbers.size(0), columns), numbers.dtype, parts)
        self.numbers = numbers
        self._classes = classes

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    def _rows(self, at: slice) -> Tensor:
        numbers = self.numbers[at]
        return numbers.new_zeros(numbers.size(0), self.size[1]).scatter_(1, self._classes[at], numbers)

    def _columns(self, at: slice) -> Tensor:
        inside = self.is_inside(at)
        count = at.stop - at.start
        places = torch.where(inside, self._classes - at.start, 0)
        return self.numbers.new_zeros(self.size[0], count).scatter_(1, places, torch.where(inside, self.numbers, 0))

    def _make(self) -> Tensor:
        return self._rows(slice(0, self.size[0]))

    def is_inside(self, at: slice) -> Tensor:
        """One column: whether a row's number is in these columns."""
        return torch.logical_and(self._classes >= at.start, self._classes < at.stop)


class SoftmaxGradient(_Of):
    """The gradient of the logits."""

    def __init__(self, gradient: OneOfEach, output: LogSoftmax) -> None:
        super().__init__(output, output.dtype)
        gradient._users.add(self)
        self._gradient = gradient
        self._output = output

    @property
    def is_of_backward(self) -> bool:
        return True

    def _rows(self, at: slice) -> Tensor:
        return self._backward(self._gradient.rows(at), self._output.rows(at))

    def _columns(self, at: slice) -> Tensor:
        """By the operator for whole rows, which sums a row's gradient: what is not in these columns lies beside."""
        inside = self._gradient.is_inside(at)
        beside = torch.where(inside, 0, self._gradient.numbers)
        gradient = torch.cat([self._gradient.columns(at), beside], 1)
        output = torch.cat([self._output.columns(at), torch.zeros_like(beside)], 1)
        return self._backward(gradient, output)[:, :-1]

    def _make(self) -> Tensor:
        return self._backward(self._gradient.whole(), self._output.whole())

    def _backward(self, gradient: Tensor, output: Tensor) -> Tensor:
        made: Tensor = _aten._log_softmax_backward_data(gradient, output, 1, self.dtype)
        return made


def _cut(count: int, each: int) -> Iterator[slice]:
    """Parts of this size. The last one has the rest, too: kernels for few rows or columns sum in another order."""
    last = max(0, count // each - 1) * each
    yield from (slice(first, first + each) for first in range(0, last, each))
    yield slice(last, count)
