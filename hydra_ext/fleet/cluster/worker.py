"""What one process of a gang does: joins the gang, carries out its order, and writes down why it failed."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from hydra_ext.fleet import references
from hydra_ext.fleet.cluster import training
from hydra_ext.fleet.cluster.interface import Order, Task
from hydra_ext.fleet.cluster.together import run_together
from hydra_ext.fleet.devices import Device
from hydra_ext.fleet.job import Job
from hydra_ext.fleet.techniques import Gang, WontDo, technique_named
from hydra_ext.fleet.techniques.common import Beside, CommonBase
from hydra_ext.runtime.placement.sharing import SharedDevice

logger = logging.getLogger(__name__)

FAILED = 1  # exit status; the reason is in the order's error file


def run(orders: Sequence[Order], rank: int) -> int:
    """Carries out an order as one rank of its gang, or several that share a device. Returns the exit status."""
    order = orders[0]
    begun, stop = time.monotonic(), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    references.mark_worker()
    sys.path[:] = [*order.settings.path, *(each for each in sys.path if each not in order.settings.path)]
    torch.set_num_threads(order.settings.threads)
    try:
        if order.task is Task.SEARCH:
            _search(order, Job.of(dict(order.job)))
            return 0
        with _gang(order, rank) as gang:
            technique = technique_named(order.technique)
            if isinstance(technique, CommonBase) and len(orders) > 1:
                return _share_base(orders, gang, stop, begun)
            if technique.tenants > 1 and gang.ranks == 1:
                return _share_device(orders, gang, stop, begun)
            _carry_out(order, gang, stop.is_set, begun)
    except BaseException as error:  # noqa: BLE001 - told to the fleet, whatever it is: the process ends here
        traceback.print_exc()  # into the job's log
        for each in [order, *(each for each in orders[1:] if not each.result_file.exists())]:
            training.write_result(each.error_file(rank), _told(error))
        return FAILED
    return 0


def _carry_out(order: Order, gang: Gang, is_stopped: Callable[[], bool], begun: float) -> None:
    job, technique = Job.of(dict(order.job)), technique_named(order.technique)
    if order.task is Task.TRIAL:
        training.try_out(order, job, gang, technique, begun=begun)
    else:
        training.Loop(order, job, gang, is_stopped).run(technique, begun=begun)


def _share_device(orders: Sequence[Order], gang: Gang, stop: threading.Event, begun: float) -> int:
    """Carries out orders side by side, each in its turns. Returns the exit status."""
    device = SharedDevice(gang.device.given, budget=gang.device.budget)
    sharing = replace(gang, shared=device)
    statuses: list[int] = device.run(*[partial(_tenant, each, sharing, stop, begun) for each in orders])
    return max(statuses)


def _tenant(order: Order, gang: Gang, stop: threading.Event, begun: float) -> int:
    """Carries out one order. What it raises is no matter of the others. Returns what would be its exit status."""
    failure = None
    try:
        _carry_out(order, gang, partial(_is_stopped, order, stop), begun)
    except BaseException as error:  # noqa: BLE001 - told to the fleet, whatever it is: the tenant ends here
        failure = error
    return _left(order, gang, failure)


def _share_base(orders: Sequence[Order], gang: Gang, stop: threading.Event, begun: float) -> int:
    """Trains the jobs of several orders step by step together. Returns the exit status."""
    statuses = [0] * len(orders)

    def ended(number: int, error: BaseException | None) -> None:
        statuses[number] = _left(orders[number], gang, error)

    def loop(order: Order) -> training.Loop:
        return training.Loop(order, Job.of(dict(order.job)), gang, partial(_is_stopped, order, stop))

    loops = [partial(loop, order) for order in orders]
    run_together(loops, gang, begun=begun, ended=ended)
    return max(statuses)


def _is_stopped(order: Order, stop: threading.Event) -> bool:
    return stop.is_set() or order.stop_file.exists()


def _left(order: Order, gang: Gang, failure: BaseException | None) -> int:
    """Tells how an order's part of the process has ended. Returns what would be its exit status."""
    if failure is not None:
        traceback.print_exception(failure)
        training.write_result(order.error_file(gang.rank), _told(failure))
    status = 0 if failure is None else FAILED
    if order.task is Task.TRAIN:
        training.write_result(order.result_file, status)
    return status


def _told(error: BaseException) -> dict[str, Any]:
    return {
        "message": f"{type(error).__name__}: {error}",
        "trace": "".join(traceback.format_exception(error)),
        # Another technique may need less memory.
        "wont_do": isinstance(error, WontDo | torch.OutOfMemoryError),
        "smallest_budget": getattr(error, "smallest_budget", None),
        "is_blameless": isinstance(error, Beside),
    }


@contextmanager
def _gang(order: Order, rank: int) -> Iterator[Gang]:
    """The gang of this process; several ranks meet by a file in the job's folder."""
    device = Device.of(dict(order.devices[rank]))
    if device.card is not None:
        torch.cuda.set_device(device.card)
    ranks = len(order.devices)
    if ranks == 1:
        yield Gang(device=device, rank=0, ranks=1)
        return
    # The store by its path: as a URL, a path with a character such as "=" would be another one.
    meeting = FileStore(str(Path(order.folder).absolute() / f"gang-{order.gang}.meeting"), ranks)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks of a gang are on one node
    backend = "gloo" if device.card is None else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=ranks)
    try:
        yield Gang(device=device, rank=rank, ranks=ranks)
    finally:
        dist.destroy_process_group()


def _search(order: Order, job: Job) -> None:
    """Asks each technique for its choice."""
    devices = [Device.of(dict(each)) for each in order.devices]
    answers = []
    for place, count in order.configuration["asked"]:
        technique = technique_named(place)
        answer: dict[str, Any] = {"technique": place, "devices": count, "configuration": None, "why_not": ""}
        answer |= {"bound": "" if technique.exact else technique.bound, "smallest_budget": None, "name": technique.name}
        try:
            if job.exact and not technique.exact:
                raise WontDo(f"exact=True rules it out: {technique.bound}")
            answer["configuration"] = dict(technique.search(job, devices[:count]))
        except WontDo as error:
            answer |= {"why_not": str(error), "smallest_budget": error.smallest_budget}
        answers.append(answer)
    training.write_result(order.result_file, answers)
