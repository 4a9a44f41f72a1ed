"""Shared helpers of the suites of misuse and of changing models."""

from __future__ import annotations

from typing import Any

from torch import nn

import hydra_ext
from support.benches import Bench
from support.windows.window_cases import train

POISONED = hydra_ext.Checks(poison_hosts=True)


def outcome(model: nn.Module, run: hydra_ext.Run | None = None, **options: Any) -> list[Any]:
    """Returns the losses of a few steps, and the parameters after them."""
    losses = train(Bench([model], [run] if run else []), **options)
    return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]
