"""What a user's function returns for one microbatch: the loss, alone or with metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def split(output: Any) -> tuple[Tensor, Any]:
    """Splits the output of ``fn``, a tensor, a pair, or a mapping with the key "loss", into loss and metrics.

    Raises:
        TypeError: the output has no loss.
    """
    loss, metrics = output, None
    if isinstance(output, Mapping) and "loss" in output:
        loss = output["loss"]
        metrics = {key: value for key, value in output.items() if key != "loss"}
    elif isinstance(output, tuple) and len(output) == 2:
        loss, metrics = output
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"fn returned a {type(output).__name__}: return the loss, (loss, metrics), or a mapping with the key 'loss'"
        )
    return loss, metrics


def check_loss(loss: Tensor) -> None:
    """Raises ValueError if backward cannot run from the loss."""
    if not loss.requires_grad or loss.numel() != 1:
        raise ValueError(
            f"fn returned a loss of shape {tuple(loss.shape)}"
            + ("" if loss.requires_grad else " that depends on no trainable parameter")
            + ": return a scalar to run backward from"
        )
