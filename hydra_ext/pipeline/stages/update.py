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

Settings = list[dict[str, Any]]  # options of an optimizer's groups, without their parameters


def settings_of(optimizer: torch.optim.Optimizer) -> Settings:
    """A copy of the optimizer's options, which a scheduler's later changes do not reach."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return copy.deepcopy(groups)


class _ScaledStep:
    """The :class:`~hydra_ext.optim.host_optimizer.StepRunner` of a native optimizer. It scales gradients, too."""

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
    """Runs the step in a thread of its own.

    The caller's thread prepares and finishes the step. The thread only computes, and its error is raised by
    :meth:`finish`.

    Attributes:
        start, end: When the thread began and ended, in seconds of ``time.perf_counter``. Valid after :meth:`sync`.
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
    """The :class:`~hydra_ext.pipeline.stages.versions.Step` of one stage's optimizer.

    Args:
        factor: Number by which the gradients are multiplied first, as ``gradient.mul_(factor)`` would.
        settings: The optimizer's options when the batch's step was called.
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
        """Whether the step writes to other memory. A step that has begun does, even if hooks were added since."""
        return self._behind is not None or _is_native(self._optimizer)

    @torch.no_grad()
    def __call__(self, destinations: Mapping[Tensor, Tensor] | None) -> None:
        """Makes the step, or ends the one that has begun."""
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
        """Begins the step, which runs behind the caller's next actions. The optimizer has to step behind them.

        See :func:`steps_behind`.
        """
        self._behind = _StepBehind(self._factor, destinations)
        self._step(self._behind)

    def wait(self) -> tuple[float, float] | None:
        """Waits for the step that has begun.

        Returns:
            Its start and end, in seconds of ``time.perf_counter``; None if it did not run behind other actions.
        """
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
    """Whether its steps can run while other actions run: they call no code of the user and draw no random numbers."""
    if optimizer is None or not _is_native(optimizer):
        return False
    return all(not parameter.is_cuda for group in optimizer.param_groups for parameter in group["params"])


def _is_native(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its steps are native ones and call no other code.

    Hooks, and a ``step()`` that overrides the native one, read scaled gradients, and weights in the parameters. These
    are the newest weights before the step and the new ones after it. Their writes to both count.
    """
    hooks = (*_global_optimizer_pre_hooks, *_global_optimizer_post_hooks)
    if not isinstance(optimizer, HostOptimizer) or hooks:
        return False
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    return _without_torch(optimizer.step) is _without_torch(HostOptimizer.step)


def _without_torch(step: Callable[..., Any]) -> object:
    """The function inside torch's wrappers: those for hooks, for schedulers, and for ``no_grad``."""

    def is_users(function: Any) -> bool:
        return not getattr(function, "__globals__", {}).get("__name__", "").startswith("torch.")

    return inspect.unwrap(getattr(step, "__func__", step), stop=is_users)


@contextmanager
def _under(optimizer: torch.optim.Optimizer, settings: Settings) -> Iterator[None]:
    """Gives the optimizer these settings for the body. An option that the body changes keeps its new value."""
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
    """Whether two options of groups are equal. An option may be a tensor, such as a learning rate."""
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        return isinstance(value, Tensor) and isinstance(other, Tensor) and torch.equal(value, other)
    return bool(value == other)


def _scale(gradient: Tensor, factor: float) -> None:
    if gradient.device.type == "cpu" and gradient.dtype in (torch.float32, torch.bfloat16, torch.float16):
        _C.scale_gradient(gradient, factor)
    else:
        gradient.mul_(factor)
