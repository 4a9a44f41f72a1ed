"""How tensors lie in memory, and copies that lie so.

Kernels sum in the order of the strides, and some (a matrix times a vector) by how the rows are aligned: what is
computed from a copy has the last bits of what is computed from the tensor only where both lie alike.
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
ROOM = 3  # times the memory of its elements that a copy may take, before its gaps are closed up


@dataclass(frozen=True)
class Layout:
    """Where the elements of a tensor are.

    Attributes:
        lead: how many elements after a multiple of 64 bytes the first one is.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    lead: int = 0

    @staticmethod
    def of(tensor: Tensor) -> Layout:
        """That of a copy.

        It is the tensor's own, unless that takes more than three times the memory of its elements, as for a narrow
        part of something large: then each gap is closed up to less than 64 bytes, in which the alignment stays; where
        dimensions overlap, too, the copy is contiguous.
        """
        itemsize = tensor.itemsize
        made = Layout(tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.data_ptr() % ALIGNMENT // itemsize)
        if tensor.is_contiguous() or made.extent <= ROOM * made._elements:
            return made
        closer = _closer(made.size, made.stride, max(1, ALIGNMENT // itemsize))
        return replace(made, stride=closer or _contiguous(made.size))

    @cached_property
    def extent(self) -> int:
        """Elements of memory from the first to the last."""
        extent = 1
        for size, stride in zip(self.size, self.stride, strict=True):
            if not size:
                return 0
            extent += (size - 1) * stride
        return extent

    @property
    def _elements(self) -> int:
        """Without those that are one and the same by a stride of 0."""
        return math.prod([size for size, stride in zip(self.size, self.stride, strict=True) if stride or not size])

    @cached_property
    def packed(self) -> Layout:
        """The same order without gaps; what is one element in several places still is.

        Itself where there are no gaps, and where they cannot be told, since dimensions overlap.
        """
        if self.extent <= self._elements:
            return self
        stride = _closer(self.size, self.stride, 0)
        return self if stride is None else replace(self, stride=stride, lead=0)

    @property
    def nbytes(self) -> int:
        """Of memory, gaps included."""
        return self.extent * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        if not self.lead:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)
        memory = torch.empty(self.lead + self.extent, dtype=self.dtype, device=device)
        return memory.as_strided(self.size, self.stride, self.lead).detach()  # which is no view

    def copy(self, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        """A copy that lies so, without a graph; of a tensor with these sizes, in the same order, and with the same
        strides of 0."""
        made = self.empty(device or tensor.device)
        with torch.no_grad():
            if self.stride == tensor.stride() and self.packed is self:
                memory(made).copy_(memory(tensor))
            else:
                self.once(made).copy_(self.once(tensor.detach()))
        return made

    def once(self, tensor: Tensor) -> Tensor:
        """Each element in one place."""
        for dimension, stride in enumerate(self.stride):
            if stride == 0 and self.size[dimension] > 1:
                tensor = tensor.narrow(dimension, 0, 1)
        return tensor


def memory(tensor: Tensor) -> Tensor:
    """From the first element to the last, in the order there; no copy."""
    is_plain = tensor.is_contiguous()
    extent = tensor.numel() if is_plain else Layout(tensor.dtype, tuple(tensor.shape), tensor.stride()).extent
    return tensor.detach().as_strided((extent,), (1,))


def copied(tensor: Tensor, *, aligned: bool = True) -> Tensor:
    """A copy without a graph, which lies as :meth:`Layout.of` says.

    Args:
        aligned: it begins where the tensor begins; else at a multiple of 64 bytes, and has no memory before that.
    """
    tensor = tensor.detach()
    if not has_plain_numbers(tensor):
        return clone(tensor)
    layout = Layout.of(tensor)
    layout = layout if aligned else replace(layout, lead=0)
    return layout.copy(tensor) if layout.lead or not tensor.is_contiguous() else tensor.clone()


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """Equal for tensors of one size of which the same parts lie next to one another, in the same order: what is a view
    of the one is a view of the other."""
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return ()
    size, stride = tuple(tensor.shape), tensor.stride()
    order = _closer(size, stride, 1) or stride
    return tuple(step if number > 1 else 0 for number, step in zip(size, order, strict=True))


def _closer(size: Sequence[int], stride: Sequence[int], unit: int) -> tuple[int, ...] | None:
    """Smaller strides in the same order; dimensions that could be seen as one still can, and others cannot.

    A stride stays the same modulo the unit, but that of the closest elements; with 0 no gaps are left. None where
    dimensions overlap.
    """
    made = list(stride)
    extent = before = after = 1  # of the dimensions so far: elements, and strides of one that would follow closely
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
