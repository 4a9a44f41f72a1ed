"""Layout of gradients in memory: the native loops need the parameter's strides."""

from __future__ import annotations

import torch
from torch import Tensor


def as_parameter_lies(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient if it has the parameter's strides, otherwise a copy that has them."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
