"""Waits for data: what a loader tells the runs that the thread which calls it trains.

A run knows no loader, as this package is optional.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from hydra_ext.runtime import engine

Result = TypeVar("Result")


def waits_for_data(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorates what a loader's consumer calls for an item: runs learn how long it takes."""

    @wraps(function)
    def timed(*args: Any) -> Result:
        begin = time.monotonic_ns()
        try:
            return function(*args)
        finally:
            end = time.monotonic_ns()
            for run in engine.participants():
                run.meter.waited_for_data(begin, end)

    return timed
