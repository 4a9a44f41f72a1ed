"""What a step of the pipeline gives back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hydra_ext.errors import StateError


class PipelineOutput:
    """One step's losses, as every rank of the line sees them.

    The loss is known where the last stage runs and is announced to the other ranks; reading it waits for that, which
    at the first stages costs some of the pipeline's overlap. Reading the step before's costs nothing.

    Attributes:
        batch: number of the step.
        grad_norm: norm of the gradients of the last update since the step before, before clipping; None without
            ``max_norm``, and where there was none. With ``"2bw"`` that is the update of the batch before the last, or
            of the last one if the pipeline was drained since.
        skipped: whether an update since the step before was left out because its norm is not finite.
    """

    def __init__(self, batch: int, *, norm: float | None, skipped: bool) -> None:
        self.batch = batch
        self.grad_norm = None if norm is None else torch.tensor(norm, dtype=torch.float32, device="cpu")
        self.skipped = skipped
        self._wait: Callable[[PipelineOutput], None] | None = None
        self._losses: Tensor | None = None
        self._metrics: tuple[Any, ...] = ()

    @property
    def loss(self) -> Tensor:
        """The mean of the microbatches' losses."""
        return self._known().mean()

    @property
    def losses(self) -> tuple[Tensor, ...]:
        """What ``fn`` returned for each microbatch, without a graph."""
        return self._known().unbind()

    @property
    def metrics(self) -> tuple[Any, ...]:
        """What ``fn`` returned beside each loss; None where it returned none."""
        self._known()
        return self._metrics

    @property
    def resolved(self) -> bool:
        """Whether reading the loss does not wait."""
        return self._losses is not None

    def resolve(self, losses: Tensor, metrics: tuple[Any, ...]) -> None:
        """By the runtime."""
        self._losses, self._metrics, self._wait = losses, metrics, None

    def wait_with(self, wait: Callable[[PipelineOutput], None]) -> None:
        """By the runtime: what resolves it."""
        self._wait = wait

    def _known(self) -> Tensor:
        if self._losses is None and self._wait is not None:
            self._wait(self)
        if self._losses is None:
            raise StateError(f"the losses of step {self.batch} did not arrive")
        return self._losses

    def __repr__(self) -> str:
        return f"PipelineOutput(batch={self.batch}, grad_norm={self.grad_norm}, skipped={self.skipped})"
