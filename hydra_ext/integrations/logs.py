"""Figures of a step as loggers of other libraries take them."""

from __future__ import annotations

from hydra_ext.runtime.reporting.figures import StepFigures


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
