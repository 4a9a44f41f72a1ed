"""One stage's optimizer step with one batch's gradients."""

from __future__ import annotations

import copy
import inspect
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from hydra_ext import _C
from hydra_ext.optim.host_optimizer import HostOptimizer, PreparedStep
from hydra_ext.pipeline.ranks.gradients import StageGradients

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

    def new_state(self, parameter: Tensor, dtype: torch.dtype, *, copies: bool) -> Tensor:
        return parameter.to(dtype, copy=True) if copies else torch.zeros_like(parameter, dtype=dtype)

    def run(self, optimizer: HostOptimizer, prepared: list[PreparedStep]) -> None:
        for part in prepared:
            part.plan.run(optimizer.pool, self._factor)
            optimizer.finish(part)

    def sync(self) -> None:
        pass


class _StepBehind(_ScaledStep):
    """Runs in a thread of its own.

    Attributes:
        start, end: of what it has done there, in seconds of ``time.perf_counter``.
    """

    def __init__(self, factor: float, destinations: Mapping[Tensor, Tensor]) -> None:
        super().__init__(factor, destinations)
        self.start = self.end = 0.0
        self._prepared: list[PreparedStep] = []
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def run(self, optimizer: HostOptimizer, prepared: list[PreparedStep]) -> None:
        self._prepared = prepared
        self._thread = threading.Thread(target=self._run, args=[optimizer.pool], name="hydra_ext update", daemon=True)
        self._thread.start()

    def _run(self, pool: _C.ThreadPool) -> None:
        self.start = time.perf_counter()
        try:
            for part in self._prepared:
                part.plan.run(pool, self._factor)
        except Exception as error:  # noqa: BLE001 - raised by finish()
            self._error = error
        self.end = time.perf_counter()

    def sync(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def finish(self, optimizer: HostOptimizer) -> None:
        self.sync()
        if self._error is not None:
            raise self._error
        for part in self._prepared:
            optimizer.finish(part)


class OptimizerStep:
    """A :class:`~hydra_ext.pipeline.stages.versions.Step`.

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
        self._behind: _StepBehind | None = None

    @property
    def writes_elsewhere(self) -> bool:
        """What has begun does, whatever hooks were added since."""
        return self._behind is not None or _is_native(self._optimizer)

    @torch.no_grad()
    def __call__(self, destinations: Mapping[Tensor, Tensor] | None) -> None:
        """What has begun is ended."""
        if self._behind is not None and isinstance(self._optimizer, HostOptimizer):
            self._behind.finish(self._optimizer)
            return
        if self.writes_elsewhere:
            self._step(_ScaledStep(self._factor, destinations))
            return
        if self._factor != 1.0:
            for gradient in self._gradients.gradients:
                if gradient is not None:
                    _scale(gradient, self._factor)
        self._step(None)

    @torch.no_grad()
    def begin(self, destinations: Mapping[Tensor, Tensor]) -> None:
        """Behind whatever the caller does next; only where the optimizer :func:`steps_behind`."""
        self._behind = _StepBehind(self._factor, destinations)
        self._step(self._behind)

    def wait(self) -> tuple[float, float] | None:
        """Until what has begun is made; when it ran, in seconds of ``time.perf_counter``."""
        if self._behind is None:
            return None
        self._behind.sync()
        return self._behind.start, self._behind.end

    def _step(self, runner: _ScaledStep | None) -> None:
        for parameter, gradient in zip(self._gradients.parameters, self._gradients.gradients, strict=True):
            parameter.grad = gradient
        optimizer = self._optimizer
        with _under(optimizer, self._settings):
            if isinstance(optimizer, HostOptimizer):
                optimizer.runner = runner
            try:
                optimizer.step()
            finally:
                if isinstance(optimizer, HostOptimizer):
                    optimizer.runner = None
        for parameter in self._gradients.parameters:
            parameter.grad = None


def steps_behind(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether its steps can be made while something else runs: no user's code sees them, nor do they draw numbers."""
    if optimizer is None or not _is_native(optimizer):
        return False
    return all(not parameter.is_cuda for group in optimizer.param_groups for parameter in group["params"])


def _is_native(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its steps are native ones without other code inside.

    Hooks, and a ``step()`` that overrides the native one, see the gradients that are applied, and weights in the
    parameters: the newest before the step, those that it has made after it. What they write there counts.
    """
    hooks = (*_global_optimizer_pre_hooks, *_global_optimizer_post_hooks)
    if not isinstance(optimizer, HostOptimizer) or hooks:
        return False
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    return _without_torch(optimizer.step) is _without_torch(HostOptimizer.step)


def _without_torch(step: Callable[..., Any]) -> object:
    """The function that torch has wrapped: for hooks, for schedulers, and without gradients."""

    def is_users(function: Any) -> bool:
        return not getattr(function, "__globals__", {}).get("__name__", "").startswith("torch.")

    return inspect.unwrap(getattr(step, "__func__", step), stop=is_users)


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
                if same_setting(group[key], chosen.get(key)):
                    group[key] = value


def same_setting(value: Any, other: Any) -> bool:
    """Of options of groups: tensors among them may have a rate in them."""
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        return isinstance(value, Tensor) and isinstance(other, Tensor) and torch.equal(value, other)
    return bool(value == other)


def _scale(gradient: Tensor, factor: float) -> None:
    if gradient.device.type == "cpu" and gradient.dtype in (torch.float32, torch.bfloat16, torch.float16):
        _C.scale_gradient(gradient, factor)
    else:
        gradient.mul_(factor)
