"""Ranks on this machine, as torchrun would start them: processes that run one function together."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

_HOST = "127.0.0.1"
_PATIENCE = timedelta(minutes=5)


def run_ranks(body: Callable[..., Any], *arguments: Any, size: int) -> list[Any]:
    """What ``body(rank, *arguments)`` returned in each of so many ranks, one thread each, in a group of gloo's."""
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_run, args=(body, arguments, rank, size, store.port, sender), daemon=True)
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()  # so that a rank that ends without a result is noticed
    results = [receiver.recv() for receiver, _ in pipes]
    for process in processes:
        process.join()
    return results


def _run(
    body: Callable[..., Any], arguments: tuple[Any, ...], rank: int, size: int, port: int, results: Connection
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore(_HOST, port, is_master=False, timeout=_PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_PATIENCE)
    results.send(body(rank, *arguments))
    dist.barrier()
    dist.destroy_process_group()


def go_first() -> bool:
    """Before other processes of this machine, for one that mostly waits; whether that is allowed."""
    try:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))
    except OSError:
        return False
    return True
