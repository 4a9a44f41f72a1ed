"""Begins operations of torch.distributed, and tells errors of the transport from others.

torch.distributed raises a RuntimeError when another rank's process has ended. torch raises one, too, for instance when
this rank has no memory left. So :func:`carrying` surrounds the calls that begin an operation of torch.distributed or
wait for one, and no other code.

NCCL may deadlock if several threads begin operations at once, whatever their groups are. So :func:`issuing` surrounds
each beginning, in one order of all threads. It never waits for another rank inside: the communicators exist before,
since :class:`~hydra_ext.pipeline.ranks.groups.Groups` makes them with their groups.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

from hydra_ext.pipeline.ranks.watch import describe_error

_one_at_a_time = threading.Lock()


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


@contextmanager
def issuing(group: dist.ProcessGroup | None, device: torch.device) -> Iterator[None]:
    """Surrounds the beginning of operations on tensors of this device; a :func:`carrying` too.

    Raises:
        TransportError: The body has raised a RuntimeError.
    """
    direct = device.type == "cuda" and backend_of(device, group) == "nccl"
    with _one_at_a_time if direct else nullcontext(), carrying():
        yield


def backend_of(device: torch.device, group: dist.ProcessGroup | None = None) -> str:
    """The backend that a group, by default that of all ranks, has for tensors of this device; empty if it has none."""
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    return backends.get(device.type, "")
