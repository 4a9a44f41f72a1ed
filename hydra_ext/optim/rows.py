"""Gradients by rows: sparse tensors that stand for dense ones, which are zero in all rows but a few.

Only parameters that were marked have such gradients. A sparse gradient of another one is what a layer with
``sparse=True`` makes, and has another meaning: rows without gradient do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hydra_ext import _C
from hydra_ext.optim import threads

_CHUNK = 1 << 16  # elements of a gradient whose squares are summed by themselves: kNormChunk of the core
_CHUNKS_AT_ONCE = 64

_marked: dict[int, Callable[[], None]] = {}  # by the identity of a parameter: brings all its rows up to date


@dataclass(frozen=True)
class RowStep:
    """One step of a parameter of which some rows have a gradient, and the others one of zero.

    Attributes:
        scalars: The rule and its numbers.
        moments: Moments of the whole parameter, fp32.
        resting: Whether a row without gradient whose moments are zero does not change.
    """

    scalars: _C.AdamStep | _C.SgdStep
    moments: tuple[Tensor, ...]
    resting: bool


def mark(parameter: Tensor, settle: Callable[[], None]) -> None:
    """Sparse gradients of this parameter stand for dense ones until :func:`unmark`.

    Args:
        settle: Brings all rows of the parameter up to date.
    """
    _marked[id(parameter)] = settle


def unmark(parameter: Tensor) -> None:
    _marked.pop(id(parameter), None)


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The parameter's gradient as it is. To others a marked parameter shows a dense one."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.grad


def dense_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient; if it is one by rows of this parameter, the dense one that it stands for."""
    if id(parameter) not in _marked or gradient.layout != torch.sparse_coo:
        return gradient
    with torch.no_grad(), _C.Uncharged():
        return gradient.to_dense()


def make_dense(parameter: Tensor) -> None:
    """Replaces a gradient by rows by the dense one that it stands for."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), _C.Uncharged():
        if has_rows(parameter) and parameter.grad is not None:
            parameter.grad = parameter.grad.to_dense()


def for_the_whole(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient for a step of the whole parameter, which is up to date then: dense if it stands for a dense one."""
    if id(parameter) not in _marked:
        return gradient
    _marked[id(parameter)]()
    make_dense(parameter)
    dense = gradient_of(parameter)
    return gradient if gradient.layout == torch.strided or dense is None else dense


def bring_to_host(tensor: Tensor) -> None:
    """Native code reads memory, and no class: has a tensor that is watched for its rows up to date, with its bytes."""
    if hasattr(type(tensor), "stands_for"):
        tensor.data_ptr()


def has_rows(parameter: Tensor) -> bool:
    """Whether the parameter's gradient is one by rows."""
    gradient = gradient_of(parameter)
    return id(parameter) in _marked and gradient is not None and gradient.layout == torch.sparse_coo


@torch.no_grad()
def rows_of(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of a gradient by rows, each once and in order, and their values. The gradient has them then, too."""
    gradient: Tensor = gradient_of(parameter)  # type: ignore[assignment]
    rows = gradient._indices()[0]
    if not bool((rows[1:] > rows[:-1]).all()):
        parameter.grad = gradient = gradient.coalesce()
    return gradient._indices()[0], gradient._values()


@torch.no_grad()
def sum_of_squares(parameter: Tensor) -> float:
    """That of the dense gradient, to the bit: chunks of it that are zero, and zeros in others, add nothing."""
    rows, values = rows_of(parameter)
    width = parameter.numel() // len(parameter)
    places = rows[:, None] * width + torch.arange(width, device="cpu")
    chunks, chunk_of = torch.unique(places // _CHUNK, return_inverse=True)
    total = 0.0
    for first in range(0, len(chunks), _CHUNKS_AT_ONCE):
        there = (chunk_of >= first) & (chunk_of < first + _CHUNKS_AT_ONCE)
        shape = (min(_CHUNKS_AT_ONCE, len(chunks) - first), _CHUNK)
        dense = torch.zeros(shape, dtype=values.dtype, device="cpu")
        dense[chunk_of[there] - first, places[there] % _CHUNK] = values.reshape(len(rows), width)[there]
        for its_sum in _C.sums_of_squares(list(dense), threads.pool(None)):
            total += its_sum
    return total
