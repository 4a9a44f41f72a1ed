"""Waits for data: what a loader tells the runs that the thread which calls it trains.

A run knows no loader, as this package is optional.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from hydra_ext.runtime import engine

Result = TypeVar("Result")


class _Depth(threading.local):
    """How many calls that wait a thread is in: a loader's source may be a loader."""

    calls = 0


_depth = _Depth()


def waits_for_data(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorates what a loader's consumer calls for an item: runs learn how long it takes.

    What such a call calls in its own thread is a part of it.
    """

    @wraps(function)
    def timed(*args: Any) -> Result:
        if _depth.calls:
            return function(*args)
        begin = time.monotonic_ns()
        _depth.calls += 1
        try:
            return function(*args)
        finally:
            _depth.calls -= 1
            end = time.monotonic_ns()
            for run in engine.participants():
                run.meter.waited_for_data(begin, end)

    return timed
