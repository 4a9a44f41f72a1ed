"""SIGTERM between steps: what is under way is finished and saved, then the process ends as it would have.

The first signal is only noted, and gives the handler that was there before its place back: a second one does what it
would have done without us. When the step under way has ended, the random states are noted; the save comes as the next
one begins, or the context ends, so that what follows ``optimizer.step()`` in the loop, schedule, scaler and
``zero_grad()``, belongs to it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from hydra_ext.errors import StateError
from hydra_ext.runtime.replicas import Replicas

EXIT_CODE = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Noted:
    """What is as a step leaves it, and may be something else when the save comes."""

    randomness: dict[str, Any]
    extra: Any


class Termination:
    """The handler of one run, from :meth:`__init__` to :meth:`close`.

    Args:
        note: called as a step ends that is to be saved.
        save: called with what was noted; None if the signal came after the last step.
        replicas: the ranks of the run: a signal to one of them is one to all.

    Raises:
        StateError: this is not the main thread.
    """

    def __init__(
        self, note: Callable[[], Noted], save: Callable[[Noted | None], None], replicas: Replicas | None
    ) -> None:
        if not _in_main_thread():
            raise StateError("run.save_on_sigterm: Python lets only the main thread handle signals: call it there")
        self._note = note
        self._save = save
        self._replicas = replicas
        self._received = False
        self._noted: Noted | None = None
        self._closed = False
        self._previous = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL  # None: of a library in C
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, self._previous)
        self._received = True
        if self._closed:  # a handler that has taken our place calls us
            self._deliver()

    def step_ended(self) -> None:
        """Every rank calls it at the end of the same step."""
        if self._noted is None and self._anybody():
            self._noted = self._note()

    def _anybody(self) -> bool:
        if self._replicas is None:
            return self._received
        return bool(self._replicas.wait(self._replicas.start_maximum([int(self._received)]))[0])

    def step_begins(self, *, last: bool = False) -> None:
        """Saves and ends the process if that is due; returns if not, or if the signal was to be ignored.

        Args:
            last: none begins any more.

        Raises:
            SystemExit: it was saved, and there was no other handler.
        """
        if self._noted is not None or (last and self._received and self._replicas is None):
            noted, self._noted = self._noted, None
            self._received = False  # should it fail, the caller hears of that
            self._save(noted)
            self._restore()
            self._deliver()

    def _deliver(self) -> None:
        """What the signal would have done."""
        self._received = False
        if self._previous is signal.SIG_DFL and _in_main_thread():
            # Rather than the signal itself: files are closed, workers ended. Shells call it the same.
            raise SystemExit(EXIT_CODE)
        signal.raise_signal(signal.SIGTERM)

    def close(self) -> None:
        """A signal that came too late, or in a step that failed, does what it would have done."""
        self._closed = True
        self._restore()
        if self._received:
            self._deliver()

    def _restore(self) -> None:
        """The handler that was there before has its place again, unless ours was replaced meanwhile."""
        if signal.getsignal(signal.SIGTERM) == self._handle and _in_main_thread():
            signal.signal(signal.SIGTERM, self._previous)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
