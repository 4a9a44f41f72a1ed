"""The exact fp32 number behind a 16-bit weight, in its two forms.

``"fp32"`` keeps the number itself. ``"split"`` keeps the part that was rounded off, as int16. The weight is the
number's upper half, rounded half-up, so the two together are the number, and take two bytes less.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOWER = "master_lower"
FULL = "master"
KINDS = ("split", "fp32")


def kind_for(parameter: Tensor, asked: str) -> str | None:
    """``"split"``, ``"fp32"``, or None for an fp32 parameter. fp16 is not the upper half of fp32."""
    if parameter.dtype == torch.float32:
        return None
    return asked if parameter.dtype == torch.bfloat16 else "fp32"


def dtype_of(kind: str) -> torch.dtype:
    return torch.int16 if kind == "split" else torch.float32


def merged(parameter: Tensor, lower: Tensor) -> Tensor:
    """The number that a split stands for, as a new fp32 tensor."""
    upper = parameter.detach().view(torch.int16).to(torch.int32)
    return upper.bitwise_left_shift_(16).add_(lower).view(torch.float32)


def lower_of(parameter: Tensor, master: Tensor) -> Tensor:
    """The lower half of a split, from the number. It is zero if the number does not round to the parameter."""
    upper = parameter.detach().view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    rest = master.view(torch.int32) - upper
    fits = (rest >= -(2**15)) & (rest < 2**15)
    return torch.where(fits, rest, 0).to(torch.int16)


def follow(master: Tensor, parameter: Tensor) -> None:
    """Sets the number to the parameter at elements that were written since, and so differ from the rounded number."""
    if parameter.dtype == torch.bfloat16:
        rounded = (master.view(torch.int32) + 0x8000).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)
    else:
        rounded = master.to(parameter.dtype)
    master.copy_(torch.where(rounded == parameter, master, parameter.to(torch.float32)))
