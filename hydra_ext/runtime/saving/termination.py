"""Handles SIGTERM between steps: the step under way is finished and saved, then the process ends as usual.

The first signal is only noted, and the previous handler is restored, so that a second signal has its usual effect.
Random states and the loader's are captured when the step under way ends. The save runs when the next step begins or the
context ends. So it includes the effects of the code after ``optimizer.step()`` in the loop: schedule, scaler and
``zero_grad()``.
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
from hydra_ext.runtime.saving.snapshot import Passing

EXIT_CODE = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Noted:
    """State that is captured at the end of a step, because it may change until the save."""

    passing: Passing
    extra: Any


class Termination:
    """The handler of one run, from :meth:`__init__` to :meth:`close`.

    Args:
        note: Function that captures state at the end of the step after which the run saves.
        save: Function that saves; called with the captured state, or None if the signal came after the last step.
        replicas: Ranks of the run, or None. A signal to one of them counts for all.

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
        self._previous = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL  # None if C code has installed the handler
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, self._previous)
        self._received = True
        if self._closed:  # a handler that replaced this one has called it
            self._deliver()

    def step_ended(self) -> None:
        """Captures state if a signal was received. Every rank calls it at the end of the same step.

        Raises:
            RankFailed: another rank has failed to capture its state.
        """
        if self._noted is not None or not self._any_rank_signalled():
            return
        try:
            self._noted = self._note() if self._replicas is None else self._replicas.together(self._note)
        except BaseException:  # raised in place of the signal's effect, as an error of the save is
            self._received = False
            raise

    def _any_rank_signalled(self) -> bool:
        if self._replicas is None:
            return self._received
        return bool(self._replicas.wait(self._replicas.start_maximum([int(self._received)]))[0])

    def step_begins(self, *, last: bool = False) -> None:
        """Saves and ends the process if a save is due. Returns if not, or if the previous handler returns.

        Args:
            last: Whether no step follows. Without other ranks, a signal after the last step is then handled as well.

        Raises:
            SystemExit: the run was saved, and there was no previous handler.
        """
        if self._noted is not None or (last and self._received and self._replicas is None):
            noted, self._noted = self._noted, None
            self._received = False  # an error of the save is raised in place of the signal's effect
            self._save(noted)
            self._restore()
            self._deliver()

    def _deliver(self) -> None:
        """Has the effect that the signal would have had without this handler."""
        self._received = False
        if self._previous is signal.SIG_DFL and _in_main_thread():
            # In place of the signal itself, so that Python closes files and ends workers; the exit code is the same.
            raise SystemExit(EXIT_CODE)
        signal.raise_signal(signal.SIGTERM)

    def close(self) -> None:
        """Restores the previous handler, and passes on a signal that came too late or in a step that failed."""
        self._closed = True
        self._restore()
        if self._received:
            self._deliver()

    def _restore(self) -> None:
        """Restores the previous handler, unless this one was replaced meanwhile."""
        if signal.getsignal(signal.SIGTERM) == self._handle and _in_main_thread():
            signal.signal(signal.SIGTERM, self._previous)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
