"""A line that shows the progress of a run: updated in a terminal after every step, else logged every few seconds."""

from __future__ import annotations

import importlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.hooks import RemovableHandle

from hydra_ext.errors import MissingDependency
from hydra_ext.runtime.reporting.figures import Callback, StepFigures

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def live_line(on_step: Callable[[Callback], RemovableHandle]) -> Iterator[None]:
    """Shows the figures of steps while the context is open; ``on_step`` registers a callback."""
    if not sys.stdout.isatty():
        handle = on_step(_LoggedLines())
        try:
            yield
        finally:
            handle.remove()
        return
    rich = _rich()
    with rich.Live(auto_refresh=False) as live:
        handle = on_step(lambda figures: live.update(str(figures), refresh=True))
        try:
            yield
        finally:
            handle.remove()


class _LoggedLines:
    """Logs the first step, and then at most one step in :data:`SECONDS_BETWEEN_LINES`."""

    def __init__(self) -> None:
        self._next = time.monotonic()

    def __call__(self, figures: StepFigures) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + SECONDS_BETWEEN_LINES
            logger.info("%s", figures)


def _rich() -> Any:
    try:
        return importlib.import_module("rich.live")
    except ImportError as error:
        raise MissingDependency(
            "run.live_line() needs rich, which is not installed: pip install 'hydra-ext[live]'"
        ) from error
