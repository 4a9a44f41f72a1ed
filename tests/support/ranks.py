"""Ranks on this machine: processes that run one function together, in a process group of gloo or NCCL."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support import forks

LIMIT_SECONDS = 300.0  # seconds for all ranks of a test, also on a busy machine; ranks that hang fail


NCCL = "nccl"
BOTH = "cpu:gloo,cuda:nccl"


def run_ranks(
    body: Callable[..., Any],
    *arguments: Any,
    folder: Path,
    size: int = 2,
    backend: str = "gloo",
    survivors: Sequence[int] | None = None,
) -> list[Any]:
    """Runs ``body(rank, *arguments)`` in ``size`` ranks, and returns their results.

    Results are tensors, numbers, texts and containers of them. With NCCL each rank has a CUDA device of its own.
    If only some ranks survive, the results are theirs.

    ``body`` has to be importable, so it is in :mod:`support`. Each group has its own folder below ``folder``, since
    ranks that find the addresses of an earlier group would wait for it."""
    folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=folder))
    processes = [
        forks.context().Process(target=_run, args=(body, arguments, rank, size, folder, backend), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + LIMIT_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
    assert not errors, "\n".join(errors)
    assert not hanging, f"ranks {hanging} of {size} are not done after {LIMIT_SECONDS} s"
    return [torch.load(folder / f"{rank}.result") for rank in (range(size) if survivors is None else survivors)]


def _take_device(rank: int, size: int) -> None:
    """Makes a device of its own the rank's current one. An emulated machine gets as many as there are ranks."""
    if "emulated_cuda" in sys.modules:
        import emulated_cuda

        emulated_cuda.configure(devices=size, bytes=2**30)
    os.environ["LOCAL_RANK"] = str(rank)  # as torchrun sets it
    torch.cuda.set_device(rank)


def _run(
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    size: int,
    folder: Path,
    backend: str = "gloo",
) -> None:
    try:
        torch.set_num_threads(1)
        if NCCL in backend:
            _take_device(rank, size)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            backend,
            init_method=f"file://{folder / 'store'}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=LIMIT_SECONDS / 2),
        )
        torch.save(body(rank, *arguments), folder / f"{rank}.result")
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
