"""Contexts and threads that have ended when a test leaves them, even if it has failed inside."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import pytest

Entered = TypeVar("Entered")


@contextmanager
def ends_in(error: type[Exception], context: AbstractContextManager[Entered]) -> Iterator[Entered]:
    """Asserts that leaving the context raises ``error``. If the test has failed inside, its own failure counts."""
    entered = context.__enter__()
    try:
        yield entered
    except BaseException:
        with contextlib.suppress(Exception):
            context.__exit__(*sys.exc_info())
        raise
    with pytest.raises(error):
        context.__exit__(None, None, None)


@contextmanager
def beside(work: Callable[[], Any], *, until: threading.Event | None = None) -> Iterator[threading.Thread]:
    """Runs another thread meanwhile, which has ended afterwards; it may wait for ``until``."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield thread
    finally:
        if until is not None:
            until.set()
        thread.join()
