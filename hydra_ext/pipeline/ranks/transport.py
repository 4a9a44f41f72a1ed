"""Tells errors of the transport from others.

torch.distributed raises a RuntimeError when another rank's process has ended. torch raises one, too, for instance when
this rank has no memory left. So :func:`carrying` surrounds the calls that begin an operation of torch.distributed or
wait for one, and no other code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hydra_ext.pipeline.ranks.watch import describe_error


class TransportError(Exception):
    """An operation of torch.distributed has failed: most likely another rank's process has ended.

    Its text is one line for the other ranks.
    """


@contextmanager
def carrying() -> Iterator[None]:
    """Turns a RuntimeError of the body into a TransportError.

    Raises:
        TransportError: The body has raised a RuntimeError.
    """
    try:
        yield
    except RuntimeError as error:
        raise TransportError(describe_error(error)) from error
