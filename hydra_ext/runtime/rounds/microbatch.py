"""One microbatch of a step: its forward, its outcome, and its random seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hydra_ext.errors import StateError

Microbatch = TypeVar("Microbatch")


@dataclass
class Outcome:
    """The results of one microbatch's forward. ``root`` is the tensor from which backward starts, until it is taken."""

    root: Tensor | None
    loss: Tensor
    metrics: Any


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


class Work(Generic[Microbatch]):
    """One microbatch's forward, from ``fn`` to the tensor from which backward starts."""

    def __init__(
        self, fn: Callable[[Microbatch], Any], microbatch: Microbatch, divisor: int, scaler: torch.amp.GradScaler | None
    ) -> None:
        self._fn = fn
        self._microbatch = microbatch
        self._divisor = divisor
        self._scaler = scaler

    def __call__(self) -> Outcome:
        loss, metrics = split(self._fn(self._microbatch))
        if not loss.requires_grad or loss.numel() != 1:
            raise ValueError(
                f"fn returned a loss of shape {tuple(loss.shape)}"
                + ("" if loss.requires_grad else " that depends on no trainable parameter")
                + ": return a scalar to run backward from"
            )
        root = loss / self._divisor if self._divisor != 1 else loss
        if self._scaler is not None:
            root = self._scaler.scale(root)
        metrics = tree_map_only(Tensor, Tensor.detach, metrics)
        return Outcome(root, loss.detach(), metrics)


def take_root(outcome: Outcome) -> Tensor:
    """Takes the tensor from which backward starts out of the outcome, so that nothing else refers to the graph."""
    root, outcome.root = outcome.root, None
    if root is None:
        raise StateError("the backward of this microbatch has run")
    return root


def draw_seeds(count: int) -> list[int]:
    """Draws one seed for each microbatch from the caller's random state."""
    drawn: list[int] = torch.randint(2**62, (count,), generator=torch.default_generator, device="cpu").tolist()
    return drawn


def checked_seeds(seeds: Sequence[int] | None, count: int, round_size: int | None, reduction: str) -> list[int]:
    """Checks arguments of ``run.step``, and returns one seed for each of ``count`` microbatches.

    Raises:
        ValueError: an argument is invalid.
    """
    if not count or (round_size is not None and round_size < 1) or reduction not in ("mean", "sum"):
        raise ValueError(
            f"run.step was given {count} microbatches, round_size={round_size}, reduction={reduction!r}: "
            "give at least one microbatch, a positive size, 'mean' or 'sum'"
        )
    seeds = draw_seeds(count) if seeds is None else list(seeds)
    if len(seeds) != count:
        raise ValueError(f"run.step was given {len(seeds)} seeds for {count} microbatches")
    return seeds
