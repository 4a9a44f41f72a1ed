"""Losses of two maps: each element on the device, the sum on the host.

The map of elementwise losses is summed by torch's own reduction where it lies, so that equal elements give an equal
loss to the last bit; a sum reads each number once, and the link would be slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hydra_ext.tiled.rowwise import pointwise
from hydra_ext.tiled.run import TiledRun

_NONE, _MEAN = 0, 1  # at::Reduction


def _reduction_at(func: Any) -> int:
    return [argument.name for argument in func._schema.arguments].index("reduction")


def _as_given(func: Any, args: Sequence[Any]) -> list[Any]:
    """All arguments in order, those left out as by default."""
    return [*args, *(argument.default_value for argument in func._schema.arguments[len(args) :])]


def forward(run: TiledRun, func: Any, *args: Any) -> torch.Tensor:
    """``aten.mse_loss`` and others with a ``reduction``, of maps of the same shape."""
    given = _as_given(func, args)
    place = _reduction_at(func)
    reduction, given[place] = given[place], _NONE
    losses: torch.Tensor = pointwise(run, func, *given)
    if reduction == _NONE:
        return losses
    return losses.mean() if reduction == _MEAN else losses.sum()


def backward(run: TiledRun, func: Any, gradient: torch.Tensor, *args: Any) -> torch.Tensor:
    """Their backward. The mean's divisor is the whole map's number of elements."""
    given = _as_given(func, (gradient, *args))
    place = _reduction_at(func)
    reduction, given[place] = given[place], _NONE
    if reduction == _MEAN:
        given[0] = gradient / args[0].numel()
    given[0] = given[0].expand(args[0].shape)
    made: torch.Tensor = pointwise(run, func, *given)
    return made
