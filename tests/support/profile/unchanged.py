"""What a microbatch that was only watched has to leave as it was."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def state_of(model: nn.Module) -> list[Any]:
    """Tensors and their versions, modules with what they hold and their hooks, and gradients."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        [(name, id(tensor), tensor._version, tensor.detach().clone()) for name, tensor in tensors],
        [(id(each), list(each._forward_hooks), list(each.__dict__), each.training) for each in model.modules()],
        [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in model.parameters()],
    ]


def random_states() -> list[Any]:
    return [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]


def is_same(one: Any, other: Any) -> bool:
    """Compares tensors within lists and tuples, too."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)
