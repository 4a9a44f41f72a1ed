"""How a gradient lies in memory: the native loops want it as the parameter lies."""

from __future__ import annotations

import torch
from torch import Tensor


def as_parameter_lies(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient, or a copy that lies as the parameter does."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
