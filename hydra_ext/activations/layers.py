"""Error bounds of the layers whose inputs a stash compresses, and the errors that they cause in gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext import _C
from hydra_ext.activations.report import LayerReport
from hydra_ext.policy import Compress

FaceOf = Callable[[Tensor], Tensor | None]
"""Gives the tensor that a forward uses in place of a parameter; None if it uses the parameter itself."""


class Layers:
    """The layers of one model under one policy.

    Args:
        model: Model whose parameter names identify the layers in the report.
        optimizer: Optimizer whose momentum is the scale for errors.
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
        """Called before an optimizer step, when the gradients and the momentum of the last step exist."""
        if self._optimizer is not None and self._steps % self._every == 0:
            weights = {id(figures.weight) for figures in self.bounds.layers()}
            for parameter, ratio in momentum_over_gradient(
                self._optimizer, lambda parameter: id(self._face(parameter)) in weights
            ):
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
def momentum_over_gradient(
    optimizer: torch.optim.Optimizer, wanted: Callable[[Tensor], bool]
) -> Iterator[tuple[Tensor, float]]:
    """Yields parameters with the norm of their momentum over the norm of their gradient.

    The momentum is the last step's, scaled to a mean of gradients. Parameters that lack a momentum or a gradient, or
    whose gradient is 0 or not finite, are left out.
    """
    for group in optimizer.param_groups:
        for parameter in filter(wanted, group["params"]):
            state = optimizer.state.get(parameter, {})
            momentum, share = state.get("exp_avg"), 1.0
            if momentum is None and "dampening" in group:  # SGD: RMSprop's buffer does not sum plain gradients
                momentum = state.get("momentum_buffer")
                share = (1.0 - float(group.get("momentum", 0.0))) / (1.0 - float(group["dampening"]))
            if _has_a_norm(momentum) and _has_a_norm(parameter.grad):
                gradient = _norm(parameter.grad)
                if 0 < gradient < float("inf"):
                    yield parameter, share * _norm(momentum) / gradient


def _has_a_norm(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.is_floating_point()


def _norm(tensor: Any) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float32))
