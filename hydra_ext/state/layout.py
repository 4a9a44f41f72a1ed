"""Layouts of tensors in memory, and copies with the same layout.

Kernels sum in the order of the strides. Some, such as a matrix times a vector, also depend on the alignment of rows.
So results from a copy have the same last bits as results from the tensor only if both have the same layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from hydra_ext.state.numbers import clone, has_plain_numbers

ALIGNMENT = 64  # bytes: torch's memory begins at a multiple, and no vector register is longer
ROOM = 3  # a copy may span this multiple of its elements' bytes before its gaps are closed


@dataclass(frozen=True)
class Layout:
    """Where the elements of a tensor are.

    Attributes:
        lead: Number of elements between a multiple of 64 bytes and the first element.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    lead: int = 0

    @staticmethod
    def of(tensor: Tensor) -> Layout:
        """The layout of a tensor's copy.

        It is the tensor's own, unless that spans more than three times the bytes of its elements. A narrow part of a
        large tensor does. Then each gap is closed to less than 64 bytes, which keeps the alignment. If dimensions
        overlap as well, the copy is contiguous.
        """
        itemsize = tensor.itemsize
        made = Layout(tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.data_ptr() % ALIGNMENT // itemsize)
        if tensor.is_contiguous() or made.extent <= ROOM * made._elements:
            return made
        closer = _closer(made.size, made.stride, max(1, ALIGNMENT // itemsize))
        return replace(made, stride=closer or _contiguous(made.size))

    @cached_property
    def extent(self) -> int:
        """Number of elements of memory from the first element to the last."""
        extent = 1
        for size, stride in zip(self.size, self.stride, strict=True):
            if not size:
                return 0
            extent += (size - 1) * stride
        return extent

    @property
    def _elements(self) -> int:
        """Number of elements. Elements in one place, by a stride of 0, count once."""
        return math.prod([size for size, stride in zip(self.size, self.stride, strict=True) if stride or not size])

    @cached_property
    def packed(self) -> Layout:
        """The same order without gaps. Strides of 0 stay.

        The layout itself if it has no gaps, or if its dimensions overlap, which hides the gaps.
        """
        if self.extent <= self._elements:
            return self
        stride = _closer(self.size, self.stride, 0)
        return self if stride is None else replace(self, stride=stride, lead=0)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, gaps included."""
        return self.extent * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        if not self.lead:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)
        memory = torch.empty(self.lead + self.extent, dtype=self.dtype, device=device)
        return memory.as_strided(self.size, self.stride, self.lead).detach()  # detached, it is not a view

    def copy(self, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        """A copy with this layout, without a graph.

        The tensor must have these sizes, its strides in the same order, and the same strides of 0.
        """
        made = self.empty(device or tensor.device)
        with torch.no_grad():
            if self.stride == tensor.stride() and self.packed is self:
                memory(made).copy_(memory(tensor))
            else:
                self.once(made).copy_(self.once(tensor.detach()))
        return made

    def once(self, tensor: Tensor) -> Tensor:
        """The tensor without the repetitions that this layout has by strides of 0."""
        for dimension, stride in enumerate(self.stride):
            if stride == 0 and self.size[dimension] > 1:
                tensor = tensor.narrow(dimension, 0, 1)
        return tensor


def memory(tensor: Tensor) -> Tensor:
    """A flat view of a tensor's memory, from the first element to the last, in memory order."""
    is_plain = tensor.is_contiguous()
    extent = tensor.numel() if is_plain else Layout(tensor.dtype, tuple(tensor.shape), tensor.stride()).extent
    return tensor.detach().as_strided((extent,), (1,))


def copied(tensor: Tensor, *, aligned: bool = True) -> Tensor:
    """A copy without a graph, in the layout that :meth:`Layout.of` gives.

    Args:
        aligned: Whether the copy begins at the tensor's distance from a multiple of 64 bytes. If not, it begins at such
            a multiple, and its storage has no bytes before its first element.
    """
    tensor = tensor.detach()
    if not has_plain_numbers(tensor):
        return clone(tensor)
    layout = Layout.of(tensor)
    layout = layout if aligned else replace(layout, lead=0)
    return layout.copy(tensor) if layout.lead or not tensor.is_contiguous() else tensor.clone()


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """A key for the order of a tensor's elements in memory.

    Equal keys of tensors of one size mean the same dimensions next to each other in the same order. Any operation that
    gives a view of the one gives a view of the other.
    """
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return ()
    size, stride = tuple(tensor.shape), tensor.stride()
    order = _closer(size, stride, 1) or stride
    return tuple(step if number > 1 else 0 for number, step in zip(size, order, strict=True))


def _closer(size: Sequence[int], stride: Sequence[int], unit: int) -> tuple[int, ...] | None:
    """Smaller strides in the same order. Dimensions that could be viewed as one still can, and others cannot.

    A stride stays the same modulo the unit, except the smallest one. With a unit of 0 no gaps are left. None if
    dimensions overlap.
    """
    made = list(stride)
    # Of the dimensions so far: their extent, and the stride of a next dimension without a gap, before and after.
    extent = before = after = 1
    for step, dimension in sorted((s, d) for d, (n, s) in enumerate(zip(size, stride, strict=True)) if n > 1 and s):
        if step < extent:
            return None
        if unit == 0 or step == before:
            made[dimension] = after
        else:
            least = after + 1
            made[dimension] = min(step, least if extent == 1 else least + (step - least) % unit)
        extent += (size[dimension] - 1) * step
        before, after = step * size[dimension], made[dimension] * size[dimension]
    return tuple(made)


def _contiguous(size: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(size[dimension + 1 :]) for dimension in range(len(size)))
