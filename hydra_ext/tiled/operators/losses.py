"""Losses of two maps: each element on the device, the sum on the host.

torch's own reduction on the host sums the map of elementwise losses, so that equal elements give an equal loss to the
last bit. A sum reads each number once; the link would be slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hydra_ext.tiled.operators.rowwise import over_rows, pointwise
from hydra_ext.tiled.run import TiledRun

_NONE, _MEAN = 0, 1  # at::Reduction


def _reduction_at(func: Any) -> int:
    return [argument.name for argument in func._schema.arguments].index("reduction")


def _as_given(func: Any, args: Sequence[Any]) -> list[Any]:
    """All arguments in order, with defaults for those that were left out."""
    return [*args, *(argument.default_value for argument in func._schema.arguments[len(args) :])]


def forward(run: TiledRun, func: Any, *args: Any) -> torch.Tensor:
    """``aten.mse_loss`` and other losses with a ``reduction``, for maps of the same shape."""
    given = _as_given(func, args)
    place = _reduction_at(func)
    reduction, given[place] = given[place], _NONE
    losses: torch.Tensor = pointwise(run, func, *given)
    if reduction == _NONE:
        return losses
    return losses.mean() if reduction == _MEAN else losses.sum()


def backward(run: TiledRun, func: Any, gradient: torch.Tensor, *args: Any) -> torch.Tensor:
    """Backward of these losses. The mean's divisor is the whole map's number of elements."""
    given = _as_given(func, (gradient, *args))
    place = _reduction_at(func)
    reduction, given[place] = given[place], _NONE
    if reduction == _MEAN:
        given[0] = gradient / args[0].numel()
    given[0] = given[0].expand(args[0].shape)
    made: torch.Tensor = pointwise(run, func, *given)
    return made


def log_sigmoid(run: TiledRun, func: Any, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``aten.log_sigmoid_forward``, without the buffer that it keeps for its backward."""
    result = torch.empty(source.shape, dtype=source.dtype, device="cpu")
    over_rows(run, [source], [result], lambda strip: [func(strip)[0]], temporary_bytes=source.element_size())
    return result, source.new_empty(0)


def log_sigmoid_backward(
    run: TiledRun, func: Any, gradient: torch.Tensor, source: torch.Tensor, _buffer: torch.Tensor
) -> torch.Tensor:
    """``aten.log_sigmoid_backward``. Each strip computes its part of the buffer again."""
    result = torch.empty(source.shape, dtype=source.dtype, device="cpu")

    def compute(outgoing: torch.Tensor, strip: torch.Tensor) -> Sequence[torch.Tensor]:
        return [func(outgoing, strip, torch.ops.aten.log_sigmoid_forward(strip)[1])]

    over_rows(run, [gradient, source], [result], compute, temporary_bytes=2 * source.element_size())
    return result
