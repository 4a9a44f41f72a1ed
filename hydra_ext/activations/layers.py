"""What a stash learns of layers whose inputs it compresses: within which bound, and what that does to gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from hydra_ext import _C
from hydra_ext.activations.report import LayerReport
from hydra_ext.policy import Compress

FaceOf = Callable[[Tensor], Tensor | None]
"""The tensor that a forward takes in place of a parameter; None for the parameter itself."""


class Layers:
    """Of one model and one policy.

    Args:
        model: gives layers their names.
        optimizer: whose momentum errors are measured by.
    """

    def __init__(
        self, policy: Compress, model: nn.Module | None, optimizer: torch.optim.Optimizer | None, face_of: FaceOf
    ) -> None:
        fixed = None if isinstance(policy.error, str) else float(policy.error)
        self.bounds = _C.LayerBounds(fixed=fixed, fraction=policy.fraction, every=policy.every)
        self._model = model
        self._optimizer = optimizer
        self._face_of = face_of
        self._every = policy.every
        self._steps = 0

    def step_begins(self) -> None:
        """The optimizer has its gradients, and the momentum of its last step."""
        if self._optimizer is not None and self._steps % self._every == 0:
            for parameter, ratio in momentum_over_gradient(self._optimizer):
                self.bounds.set_momentum(self._face(parameter), min(ratio, 1.0))
        self._steps += 1

    def report(self) -> Iterator[LayerReport]:
        named = [] if self._model is None else self._model.named_parameters()
        names = {id(self._face(parameter)): name for name, parameter in named}
        for figures in self.bounds.layers():
            yield LayerReport(
                weight=names.get(id(figures.weight), f"unnamed {tuple(figures.weight.shape)}"),
                forwards=figures.forwards,
                samples=figures.samples,
                bound=figures.bound,
                saved_bytes=figures.saved_bytes,
                stored_bytes=figures.stored_bytes,
                gradient_error=figures.relative_error if figures.saved_bytes else 0.0,
            )

    def _face(self, parameter: Tensor) -> Tensor:
        face = self._face_of(parameter)
        return parameter if face is None else face


@torch.no_grad()
def momentum_over_gradient(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, float]]:
    """Of each parameter that has both: the norm of the momentum, as a mean of gradients, over that of its gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            momentum, share = state.get("exp_avg"), 1.0
            if momentum is None:
                momentum, share = state.get("momentum_buffer"), 1.0 - float(group.get("momentum", 0.0))
            if isinstance(momentum, Tensor) and parameter.grad is not None:
                gradient = float(torch.linalg.vector_norm(parameter.grad, dtype=torch.float32))
                if 0 < gradient < float("inf"):
                    yield parameter, share * float(torch.linalg.vector_norm(momentum, dtype=torch.float32)) / gradient
