"""One microbatch of a step: its forward, its outcome, and its random seed."""

from __future__ import annotations

import dataclasses
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hydra_ext.errors import StateError
from hydra_ext.outputs import check_loss, split
from hydra_ext.state.contents import LEAVES

Microbatch = TypeVar("Microbatch")


@dataclass
class Outcome:
    """The results of one microbatch's forward. ``root`` is the tensor from which backward starts, until it is taken."""

    root: Tensor | None
    loss: Tensor
    metrics: Any


class Work(Generic[Microbatch]):
    """One microbatch's forward, from ``fn`` to the tensor from which backward starts."""

    def __init__(
        self, fn: Callable[[Microbatch], Any], microbatch: Microbatch, divisor: int, scaler: torch.amp.GradScaler | None
    ) -> None:
        self._fn = fn
        self._microbatch = microbatch
        self._divisor = divisor
        self._scaler = scaler

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self._microbatch)

    def __call__(self) -> Outcome:
        loss, metrics = split(self._fn(self._microbatch))
        check_loss(loss)
        root = loss / self._divisor if self._divisor != 1 else loss
        if self._scaler is not None:
            root = self._scaler.scale(root)
        metrics = tree_map_only(Tensor, _detached, metrics)
        return Outcome(root, loss.detach(), metrics)


def _detached(metric: Tensor) -> Tensor:
    if type(metric) is Tensor:
        return metric.detach()
    from hydra_ext.heads.unmade import Unmade

    # Logits that were not made are now: after the step their weight has other numbers.
    return metric.made() if isinstance(metric, Unmade) else metric.detach()


def tensor_bytes(value: Any) -> int:
    """Of the tensors in containers and dataclasses. No code of the user runs to find them."""
    size, known, left = 0, set[int](), [value]  # no recursion: a microbatch may be a chain of any length
    with torch._C.DisableTorchFunction():
        while left:
            value = left.pop()
            if isinstance(value, Tensor):
                size += value.numel() * value.element_size()
            elif type(value) not in LEAVES and id(value) not in known:
                known.add(id(value))  # objects may lead back to themselves
                left += (member for member in _members(value) if type(member) not in LEAVES)
    return size


def _members(value: Any) -> Iterable[Any]:
    if isinstance(value, UserDict):  # such as a tokenizer's BatchEncoding
        value = value.data
    if isinstance(value, dict):
        return dict.values(value)
    # Of the kind itself: a subclass may have an iterator of its own.
    if isinstance(value, list):
        return list.__iter__(value)
    if isinstance(value, tuple):
        return tuple.__iter__(value)
    if isinstance(value, deque):
        return deque.__iter__(value)
    return vars(value).values() if dataclasses.is_dataclass(value) and hasattr(value, "__dict__") else ()


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
