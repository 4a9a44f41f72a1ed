"""The numbers of tensors, put back where they were."""

from __future__ import annotations

import torch
from torch import Tensor


def on_host(tensor: Tensor) -> Tensor:
    """A copy of its numbers."""
    return tensor.detach().to("cpu", copy=True)


def differ(one: Tensor, other: Tensor) -> bool:
    """Whether a bit does; of tensors of one shape and type. NaN are equal to themselves."""
    if one.layout != torch.strided:
        return one is not other
    now, then = (tensor.detach().to("cpu").contiguous().flatten() for tensor in (one, other))
    return not torch.equal(now.view(torch.uint8), then.view(torch.uint8))


@torch.no_grad()
def put(tensor: Tensor, numbers: Tensor) -> None:
    """Writes them to it, unless they are there: who has saved it for backward is told of each write."""
    if differ(tensor, numbers):
        _once(tensor, tensor).copy_(_once(numbers, tensor))


def _once(tensor: Tensor, expanded: Tensor) -> Tensor:
    """Without the repetitions that the other one has by a stride of 0: they are no memory that could be written to."""
    if expanded.layout == torch.strided:
        for dimension, stride in enumerate(expanded.stride()):
            if stride == 0 and expanded.size(dimension) > 1:
                tensor = tensor.narrow(dimension, 0, 1)
    return tensor
