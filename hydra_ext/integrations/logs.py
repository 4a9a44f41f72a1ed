"""Figures of a step as loggers of other libraries take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hydra_ext.errors import InvalidArgument
from hydra_ext.runtime.reporting.figures import Callback, StepFigures


def logged(figures: StepFigures) -> dict[str, float]:
    """Bytes and seconds by name, such as ``hydra/seconds``."""
    return {
        "hydra/seconds": figures.seconds,
        "hydra/peak_bytes": figures.peak_bytes,
        "hydra/waited_seconds": figures.waited_seconds,
        "hydra/to_device_seconds": figures.to_device_seconds,
        "hydra/to_host_seconds": figures.to_host_seconds,
        "hydra/update_seconds": figures.update_seconds,
    }


def log_to(logger: Any) -> Callback:
    """A callback for :meth:`hydra_ext.Run.on_step` that gives the figures of each step to a logger.

    Args:
        logger: A function that takes numbers by name and ``step=``, such as ``wandb.log``, ``mlflow.log_metrics`` or
            ``fabric.log_dict``; or a ``SummaryWriter`` of TensorBoard.

    Raises:
        InvalidArgument: ``logger`` is neither.
    """
    add: Callable[..., object] | None = getattr(logger, "add_scalar", None)
    if add is None and not callable(logger):
        raise InvalidArgument(
            f"log_to() was given a {type(logger).__name__}: give a function such as wandb.log, or a SummaryWriter"
        )

    def log(figures: StepFigures) -> None:
        numbers = logged(figures)
        if add is None:
            logger(numbers, step=figures.step)
            return
        for name, number in numbers.items():
            add(name, number, figures.step)

    return log
