"""A whole training step: rounds, clipping, the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hydra_ext.errors import StateError
from hydra_ext.runtime.rounds.executor import Round, RoundOwner

Microbatch = TypeVar("Microbatch")
Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class StepOutput:
    """What a step gives back.

    Attributes:
        loss: of the step: the mean of the microbatches' losses, or their sum.
        losses: what ``fn`` returned for each microbatch, without a graph.
        grad_norm: total norm of the gradients before clipping; None without ``max_norm``.
        metrics: what ``fn`` returned beside each loss, its tensors without a graph; None where it returned none.
    """

    loss: Tensor
    losses: tuple[Tensor, ...]
    grad_norm: Tensor | None
    metrics: tuple[Any, ...]


@dataclass(frozen=True)
class Outcome:
    """What one microbatch's forward gave."""

    root: Tensor
    loss: Tensor
    metrics: Any


def split(output: Any) -> tuple[Tensor, Any]:
    """The loss, and what came with it: of a tensor, a pair, or a mapping with the key "loss".

    Raises:
        TypeError: there is no loss in it.
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
    """One microbatch's forward up to what its backward starts from."""

    def __init__(
        self, fn: Callable[[Microbatch], Any], microbatch: Microbatch, divisor: int, scaler: torch.amp.GradScaler | None
    ) -> None:
        self._fn = fn
        self._microbatch = microbatch
        self._divisor = divisor
        self._scaler = scaler

    def __call__(self) -> Outcome:
        loss, metrics = split(self._fn(self._microbatch))
        root = loss / self._divisor if self._divisor != 1 else loss
        if self._scaler is not None:
            root = self._scaler.scale(root)
        metrics = tree_map_only(Tensor, Tensor.detach, metrics)
        return Outcome(root, loss.detach(), metrics)


class StepOwner(RoundOwner, Protocol):
    """The run whose model is trained."""

    optimizer: torch.optim.Optimizer | None


class Stepper:
    """The training steps of one run.

    Attributes:
        rounds: how many there were.
        refusals: rounds that could not be run as such.
        fallbacks: microbatches that were run one at a time instead.
    """

    def __init__(self, owner: StepOwner) -> None:
        self._owner = owner
        self.rounds = 0
        self.refusals = 0
        self.fallbacks = 0

    def step(
        self,
        microbatches: Iterable[Microbatch],
        fn: Callable[[Microbatch], Any],
        *,
        max_norm: float | None,
        round_size: int | None,
        reduction: Reduction,
        scaler: torch.amp.GradScaler | None,
        seeds: Sequence[int] | None,
    ) -> StepOutput:
        optimizer = self._owner.optimizer
        if optimizer is None:
            raise StateError("run.step needs the optimizer: offload(model, optimizer, budget=...)")
        given = list(microbatches)
        if not given:
            raise ValueError("run.step was given no microbatches")
        divisor = len(given) if reduction == "mean" else 1
        works = [Work(fn, microbatch, divisor, scaler) for microbatch in given]
        seeds = _draw_seeds(len(works)) if seeds is None else list(seeds)
        outcomes: list[Outcome] = []
        size = round_size or len(works)
        for first in range(0, len(works), size):
            outcomes += self._run_round(works[first : first + size], seeds[first : first + size])
        norm = self._update(optimizer, max_norm, scaler)
        losses = torch.stack([outcome.loss for outcome in outcomes])
        return StepOutput(
            loss=losses.mean() if reduction == "mean" else losses.sum(),
            losses=tuple(outcome.loss for outcome in outcomes),
            grad_norm=norm,
            metrics=tuple(outcome.metrics for outcome in outcomes),
        )

    def _run_round(self, works: Sequence[Work[Any]], seeds: Sequence[int]) -> list[Outcome]:
        this = Round(self._owner, works, seeds)
        outcomes = this.forward()
        this.backward([outcome.root for outcome in outcomes])
        self.rounds += 1
        return outcomes

    def _update(
        self, optimizer: torch.optim.Optimizer, max_norm: float | None, scaler: torch.amp.GradScaler | None
    ) -> Tensor | None:
        norm = None
        if scaler is not None:
            scaler.unscale_(optimizer)
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self._owner.model.parameters(), max_norm)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        return norm


def _draw_seeds(count: int) -> list[int]:
    """One per microbatch, from the caller's random state."""
    drawn: list[int] = torch.randint(2**62, (count,), generator=torch.default_generator, device="cpu").tolist()
    return drawn
