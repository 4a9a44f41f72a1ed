"""The output of one step of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hydra_ext.errors import StateError


class PipelineOutput:
    """One step's losses, as every rank of the line sees them.

    The rank of the last stage computes the loss and sends it to the other ranks. Reading it waits until it arrives. On
    the first stages this costs some of the pipeline's overlap. The loss of the step before can be read without a wait.

    Attributes:
        batch: Number of the step.
        grad_norm: Norm of the gradients, before clipping, of the last update since the step before. None without
            ``max_norm``, and if there was no such update. With ``"2bw"`` step t makes the update of batch t - 2. After
            a drain the last update is that of batch t - 1.
        skipped: Whether an update since the step before was left out because its norm was not finite.
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
        """The loss that ``fn`` returned for each microbatch, without a graph."""
        return self._known().unbind()

    @property
    def metrics(self) -> tuple[Any, ...]:
        """The metrics that ``fn`` returned beside each loss; None where it returned none."""
        self._known()
        return self._metrics

    @property
    def resolved(self) -> bool:
        """Whether reading the loss does not wait."""
        return self._losses is not None

    def resolve(self, losses: Tensor, metrics: tuple[Any, ...]) -> None:
        """Sets the losses and metrics. Called by the runtime."""
        self._losses, self._metrics, self._wait = losses, metrics, None

    def wait_with(self, wait: Callable[[PipelineOutput], None]) -> None:
        """Sets the function that waits for the losses and resolves this output. Called by the runtime."""
        self._wait = wait

    def _known(self) -> Tensor:
        if self._losses is None and self._wait is not None:
            self._wait(self)
        if self._losses is None:
            raise StateError(f"the losses of step {self.batch} did not arrive")
        return self._losses

    def __repr__(self) -> str:
        return f"PipelineOutput(batch={self.batch}, grad_norm={self.grad_norm}, skipped={self.skipped})"
