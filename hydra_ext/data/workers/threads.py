"""Workers in threads of this process: for functions that leave the interpreter lock to others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hydra_ext.data import places
from hydra_ext.data.workers.pool import Made, Task
from hydra_ext.errors import StageFailed


class ThreadWorker:
    """
    Args:
        name: Of the stage.
        function: Called with each item. The process's random generators are not seeded for it, as others draw from
            them, too.
    """

    def __init__(self, name: str, function: Callable[[Any], Any]) -> None:
        self._name = name
        self._function = function

    def call(self, task: Task, is_next: Callable[[], bool]) -> Made:
        """
        Raises:
            StageFailed: The function has raised.
        """
        begun = time.perf_counter()
        with places.at(task.place, seeded=False):
            try:
                value = self._function(task.item)
            except Exception as error:
                raise StageFailed(
                    f"stage {self._name!r}, sample {task.number}: {type(error).__name__}: {error}",
                    stage=self._name,
                    number=task.number,
                ) from error
        return Made(value, time.perf_counter() - begun)

    def close(self) -> None:
        """It has nothing to release."""
