"""One stage's optimizer step with one batch's gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hydra_ext import _C
from hydra_ext.optim.host_optimizer import HostOptimizer, PreparedStep
from hydra_ext.pipeline.gradients import StageGradients

Settings = list[dict[str, Any]]  # of an optimizer's groups: all but their parameters


def settings_of(optimizer: torch.optim.Optimizer) -> Settings:
    """As they are now; what a scheduler does to them afterwards is not seen."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return copy.deepcopy(groups)


class _ScaledStep:
    """A native optimizer's :class:`~hydra_ext.optim.host_optimizer.StepRunner`: scales gradients on the way."""

    def __init__(self, factor: float, destinations: Mapping[Tensor, Tensor] | None) -> None:
        self._factor = factor
        self.destinations = destinations

    def parts(self, gradients: list[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
        return [gradients]

    def run(self, optimizer: HostOptimizer, prepared: list[PreparedStep]) -> None:
        for part in prepared:
            part.plan.run(optimizer.pool, self._factor)
            optimizer.finish(part)

    def sync(self) -> None:
        pass


class OptimizerStep:
    """What :meth:`~hydra_ext.pipeline.versions.StageWeights.update` calls.

    Args:
        settings: the optimizer's, at the time of the batch's step.
        factor: what the gradients are multiplied with first, as ``gradient.mul_(factor)`` would.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, gradients: StageGradients, factor: float, settings: Settings
    ) -> None:
        self._optimizer = optimizer
        self._gradients = gradients
        self._factor = factor
        self._settings = settings

    @torch.no_grad()
    def __call__(self, destinations: Mapping[Tensor, Tensor] | None) -> None:
        """``destinations``: where the new weights go; None for the parameters themselves."""
        for parameter, gradient in zip(self._gradients.parameters, self._gradients.gradients, strict=True):
            parameter.grad = gradient
        optimizer = self._optimizer
        with _under(optimizer, self._settings):
            if isinstance(optimizer, HostOptimizer):
                optimizer.runner = _ScaledStep(self._factor, destinations)
                try:
                    optimizer.step()
                finally:
                    optimizer.runner = None
            else:
                if self._factor != 1.0:
                    for gradient in self._gradients.gradients:
                        if gradient is not None:
                            _scale(gradient, self._factor)
                optimizer.step()
        for parameter in self._gradients.parameters:
            parameter.grad = None


def writes_elsewhere(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether its steps can write the new weights to other memory than that of the old ones."""
    return isinstance(optimizer, HostOptimizer)


@contextmanager
def _under(optimizer: torch.optim.Optimizer, settings: Settings) -> Iterator[None]:
    """The optimizer has these settings inside; what a step itself changes in them stays."""
    groups = optimizer.param_groups[: len(settings)]
    present = settings_of(optimizer)
    for group, chosen in zip(groups, settings, strict=True):
        group.update(chosen)
    try:
        yield
    finally:
        for group, before, chosen in zip(groups, present, settings, strict=False):
            for key, value in before.items():
                if _same(group[key], chosen.get(key)):
                    group[key] = value


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        return isinstance(value, Tensor) and isinstance(other, Tensor) and torch.equal(value, other)
    return bool(value == other)


def _scale(gradient: Tensor, factor: float) -> None:
    if gradient.device.type == "cpu" and gradient.dtype in (torch.float32, torch.bfloat16, torch.float16):
        _C.scale_gradient(gradient, factor)
    else:
        gradient.mul_(factor)
