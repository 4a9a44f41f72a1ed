"""Refuses operations in place that read elements which they write: strips would read some of them too late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from hydra_ext.errors import UnsupportedOperation
from hydra_ext.tiled.pixels import Pixels

_MOST_WORK = 10**5  # limit of numpy's search for an element that two tensors share
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def refuse_overlaps(func: Any, written: torch.Tensor, operands: Sequence[torch.Tensor]) -> None:
    """Checks that each written element has memory of its own, and that no other element is computed from it.

    torch refuses most such operations itself. The results of the others depend on the order of its loops.

    Raises:
        UnsupportedOperation: The check failed.
    """
    if not _is_apart(written):
        raise UnsupportedOperation(
            f"{func} writes to a tensor with several elements at one address, such as an expanded one: call .clone() "
            "first",
            operation=str(func),
        )
    for operand in operands:
        if not _are_same(written, operand) and _share(written, operand):
            raise UnsupportedOperation(
                f"{func} writes to memory that it reads for other elements: call .clone() on the tensor that it reads",
                operation=str(func),
            )


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Stride and size of each dimension with more than one element."""
    return [(step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


def _is_apart(tensor: torch.Tensor) -> bool:
    """Whether each dimension's stride exceeds the extent of the smaller ones. Other tensors count as overlapping."""
    reached = 0
    for step, size in sorted(_steps(tensor)):
        if step <= reached:
            return tensor.numel() == 0
        reached += (size - 1) * step
    return True


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and _steps(one) == _steps(other)
    )


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether elements of both tensors overlap in memory. If that is hard to compute, they count as overlapping."""
    if isinstance(other, Pixels) or one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    if one.element_size() not in _WHOLE_NUMBERS or other.element_size() not in _WHOLE_NUMBERS:
        return True
    views = [tensor.detach().view(_WHOLE_NUMBERS[tensor.element_size()]).numpy() for tensor in (one, other)]
    try:
        return numpy.shares_memory(views[0], views[1], max_work=_MOST_WORK)  # type: ignore[arg-type]
    except numpy.exceptions.TooHardError:
        return True
