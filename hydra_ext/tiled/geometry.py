"""Computes which rows of one map an operation needs for rows of another, in integers, for maps of any height.

Every operation runs unchanged, with its own padding, on some rows of a map. It makes the wanted rows and, at both ends
of the strip, others that are cut off. A strip begins at a multiple of the stride, so that windows lie as in the whole
map. At the map's own ends the padding is the map's.

``reach`` is ``dilation * (kernel - 1)``: a window that begins at row r ends at row r + reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Rows:
    """The rows ``begin <= r < end``."""

    begin: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.begin

    def within(self, outer: Rows) -> Rows:
        """The same rows, counted from the beginning of ``outer``."""
        return Rows(self.begin - outer.begin, self.end - outer.begin)


def strips(height: int, rows: int) -> Iterator[Rows]:
    """All rows of a map in strips of ``rows``; the last one may have fewer."""
    for begin in range(0, height, rows):
        yield Rows(begin, min(height, begin + rows))


@dataclass(frozen=True)
class Strip:
    """One call of an operation on a part of a map.

    Attributes:
        load: Rows of the operand.
        result: Rows of the whole result that the call makes.
        keep: Rows of these that are wanted and right.
    """

    load: Rows
    result: Rows
    keep: Rows


@dataclass(frozen=True)
class BackwardStrip:
    """One call of an operation's backward: the gradient of some rows of its input.

    Attributes:
        input: Rows of the input that the call gets, and makes gradients of.
        own: Rows of these whose gradient is wanted and right.
        output: Rows of the output's gradient that the call gets.
        own_output: Rows of the output that no other strip counts as its own.
    """

    input: Rows
    own: Rows
    output: Rows
    own_output: Rows


@dataclass(frozen=True)
class Window:
    """A convolution or pooling along the rows: ``out[o]`` is made of ``in[o * stride - padding + dilation * j]``.

    Attributes:
        height: Number of rows of the input.
        reach: As above.
        stride: Stride along the rows.
        padding: Padding above and below.
        outputs: Function from a number of input rows to the number of output rows, in floor or ceil mode.
        least: Least number of rows of a strip, if the map has as many; see ``convolutions.py``.
    """

    height: int
    reach: int
    stride: int
    padding: int
    outputs: Callable[[int], int]
    least: int = 1

    @classmethod
    def of_convolution(cls, *, height: int, reach: int, stride: int, padding: int, least: int = 1) -> Window:
        def outputs(rows: int) -> int:
            return (rows + 2 * padding - reach - 1) // stride + 1

        return cls(height, reach, stride, padding, outputs, least)

    def forward(self, wanted: Rows) -> Strip:
        begin = max(0, wanted.begin - -(-self.padding // self.stride))
        begin = min(begin, (self.height - 1) // self.stride) * self.stride
        end = (wanted.end - 1) * self.stride - self.padding + self.reach + 1
        load = self._grown(begin, min(self.height, max(begin + 1, end)))
        first = load.begin // self.stride
        return Strip(load, Rows(first, first + self.outputs(load.count)), wanted)

    def backward(self, own: Rows) -> BackwardStrip:
        # One reach on both sides: every window that touches one of the strip's own rows lies in the strip.
        begin = max(0, own.begin - self.reach) // self.stride * self.stride
        given = self._grown(begin, min(self.height, own.end + self.reach))
        first = given.begin // self.stride
        output = Rows(first, first + self.outputs(given.count))
        return BackwardStrip(given, own, output, Rows(self._first_after(own.begin), self._first_after(own.end)))

    def forward_most(self, rows: int) -> tuple[int, int]:
        """Most rows that a strip loads and makes for this number of wanted rows, wherever it lies."""
        return self._with_outputs(rows * self.stride + self.reach + self.stride - 1)

    def backward_most(self, rows: int) -> tuple[int, int]:
        """Most rows of the input and of the output that a strip gets for this number of own rows."""
        return self._with_outputs(rows + 2 * self.reach + 2 * (self.stride - 1))

    def _with_outputs(self, reached: int) -> tuple[int, int]:
        given = min(self.height, max(reached, self.least + 2 * (self.stride - 1)))
        return given, max(0, self.outputs(given))

    def _first_after(self, row: int) -> int:
        """The first output whose window begins at or after ``row``, counting padding; at the map's ends, its ends."""
        if row in (0, self.height):
            return 0 if row == 0 else self.outputs(self.height)
        return min(self.outputs(self.height), (row - 1 + self.padding) // self.stride + 1)

    def _grown(self, begin: int, end: int) -> Rows:
        end = max(end, begin + self.least)
        # Below its last window a strip has as many rows left over as the map: oneDNN chooses kernels by that, too.
        end = min(self.height, end + (self.height - end) % self.stride)
        if end - begin < self.least:
            begin = max(0, end - self.least) // self.stride * self.stride
        return Rows(begin, end)


@dataclass(frozen=True)
class TransposedWindow:
    """A transposed convolution along the rows: ``in[i]`` goes to ``out[i * stride - padding + dilation * j]``.

    Attributes:
        height: Number of rows of the input.
        reach, stride, padding: As in :class:`Window`.
        extra: Number of rows of output padding.
        least: As in :class:`Window`.
    """

    height: int
    reach: int
    stride: int
    padding: int
    extra: int
    least: int = 1

    def outputs(self, rows: int) -> int:
        return (rows - 1) * self.stride - 2 * self.padding + self.reach + self.extra + 1

    def forward(self, wanted: Rows) -> Strip:
        begin = -(-(wanted.begin + self.padding - self.reach) // self.stride)
        begin = min(max(0, min(begin, wanted.begin // self.stride)), self.height - 1)
        touching = (wanted.end - 1 + self.padding) // self.stride
        covering = -(-(wanted.end - 1 + 2 * self.padding - self.reach - self.extra) // self.stride)
        load = self._grown(begin, max(touching, covering, begin) + 1)
        first = load.begin * self.stride
        return Strip(load, Rows(first, first + self.outputs(load.count)), wanted)

    def backward(self, own: Rows) -> BackwardStrip:
        begin = max(0, own.begin - -(-self.padding // self.stride))
        # The strip's outputs have to cover its own rows' windows, and its own outputs in gaps between windows.
        beyond = max(0, self.padding - self.extra, self.padding - self.extra + self.stride - self.reach - 1)
        end = min(self.height, own.end + -(-beyond // self.stride))
        while self.outputs(end - begin) < 1:  # more padding than reach: rows that no output shows
            begin, end = (begin, end + 1) if end < self.height else (begin - 1, end)
        given = self._grown(begin, end)
        first = given.begin * self.stride
        output = Rows(first, first + self.outputs(given.count))
        return BackwardStrip(given, own, output, Rows(self._first_after(own.begin), self._first_after(own.end)))

    def forward_most(self, rows: int) -> tuple[int, int]:
        """As in :class:`Window`."""
        return self._with_outputs((rows - 1 + max(self.reach, 2 * self.padding - self.reach)) // self.stride + 3)

    def backward_most(self, rows: int) -> tuple[int, int]:
        """As in :class:`Window`."""
        return self._with_outputs(rows + 2 * -(-self.padding // self.stride) + 1)

    def _with_outputs(self, reached: int) -> tuple[int, int]:
        given = min(self.height, max(reached, self.least))
        return given, max(0, self.outputs(given))

    def _first_after(self, row: int) -> int:
        total = self.outputs(self.height)
        if row in (0, self.height):
            return 0 if row == 0 else total
        return min(total, max(0, row * self.stride - self.padding))

    def _grown(self, begin: int, end: int) -> Rows:
        end = min(self.height, max(end, begin + self.least))
        return Rows(min(begin, max(0, end - self.least)), end)
