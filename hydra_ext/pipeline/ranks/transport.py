"""Which errors are the transport's.

torch.distributed says with a RuntimeError that another rank's process has ended, and torch with the same one, say, that
there is no memory on this rank. So what begins an operation of torch.distributed, or waits for one, is within
:func:`carrying`, and nothing else is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hydra_ext.pipeline.ranks.watch import describe_error


class TransportError(Exception):
    """torch.distributed could not do what it was asked for: most likely another rank's process has ended. Its text is
    one line for the others."""


@contextmanager
def carrying() -> Iterator[None]:
    """
    Raises:
        TransportError: of an error in it.
    """
    try:
        yield
    except RuntimeError as error:
        raise TransportError(describe_error(error)) from error
