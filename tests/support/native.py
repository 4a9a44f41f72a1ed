"""A model and an optimizer's state, for tests of the native optimizers."""

from __future__ import annotations

import torch
from torch import nn

from support.benches import Outcome

WIDTH = 64
LAYERS = 6


def stack(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(LAYERS)])


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Outcome:
    entries = [
        value.clone()
        for parameter in model.parameters()
        for value in optimizer.state[parameter].values()
        if isinstance(value, torch.Tensor)
    ]
    return [*(parameter.detach().clone() for parameter in model.parameters()), *entries]
