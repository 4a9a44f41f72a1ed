"""Ranks that use torch.distributed on their GPUs, for tests of the emulated NCCL."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PATIENCE = 60.0  # seconds for what has to end
MOMENT = 0.3  # seconds in which what must not end would have ended


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


def backend() -> Any:
    return dist.group.WORLD._get_backend(torch.device("cuda"))  # type: ignore[union-attr]


def numbers(rank: int, count: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers whose sum depends on the order: those of rank 1 are lost beside those of rank 0."""
    large = (1.0, 1e-8, -1.0, 1e-8)[rank]
    return (torch.arange(1.0, count + 1) * large).to(dtype).cuda()


def results(rank: int) -> dict[str, Any]:
    """The results of every operation."""
    size = dist.get_world_size()
    found: dict[str, Any] = {}

    for name, op in {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}.items():
        found[name] = numbers(rank)
        dist.all_reduce(found[name], op)
    found["bf16"] = numbers(rank, dtype=torch.bfloat16)
    dist.all_reduce(found["bf16"])
    found["bool"] = torch.tensor([rank == 1, False]).cuda()
    dist.all_reduce(found["bool"])
    found["broadcast"] = numbers(rank)
    dist.broadcast(found["broadcast"], 1)
    found["reduce"] = numbers(rank)
    dist.reduce(found["reduce"], 1)
    found["all_gather"] = [torch.empty(6).cuda() for _ in range(size)]
    dist.all_gather(found["all_gather"], numbers(rank))
    found["gathered"] = torch.empty(6 * size).cuda()
    _named("all_gather_single", "all_gather_into_tensor")(found["gathered"], numbers(rank))
    found["reduce_scatter"] = torch.empty(6).cuda()
    _named("reduce_scatter_single", "reduce_scatter_tensor")(found["reduce_scatter"], numbers(rank, 6 * size))
    found["all_to_all"] = torch.empty(6 * size).cuda()
    dist.all_to_all_single(found["all_to_all"], numbers(rank, 6 * size))
    dist.barrier(device_ids=[rank])
    found["sent"] = numbers(rank)
    if rank == 0:
        dist.send(found["sent"], 1)
    elif rank == 1:
        dist.recv(found["sent"], 0)
    found["ring"] = torch.empty(6).cuda()
    for work in _ring(rank, size, found["ring"]):
        work.wait()
    return {
        name: [one.cpu() for one in value] if isinstance(value, list) else value.cpu() for name, value in found.items()
    }


def _named(name: str, earlier: str) -> Callable[..., Any]:
    """A function of torch.distributed, which earlier versions have under another name."""
    found: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, earlier)
    return found


def _ring(rank: int, size: int, into: Tensor) -> list[dist.Work]:
    """Every rank sends to the next one; unbatched, every send would wait for the one before it."""
    send = dist.P2POp(dist.isend, numbers(rank), (rank + 1) % size)
    receive = dist.P2POp(dist.irecv, into, (rank - 1) % size)
    works: list[dist.Work] = dist.batch_isend_irecv([send, receive])
    return works


def refusals(rank: int) -> list[str]:
    """The errors of what NCCL does not do."""
    wrong: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(torch.zeros(2)),
        lambda: dist.all_reduce(torch.zeros(4, 4).cuda().t()[1:]),
        lambda: dist.all_reduce(torch.zeros(2, dtype=torch.int16).cuda()),
        lambda: dist.all_reduce(torch.zeros(2, dtype=torch.int32).cuda(), dist.ReduceOp.BAND),
    ]
    errors = []
    for call in wrong:
        try:
            call()
            errors.append("")
        except (RuntimeError, ValueError, TypeError) as error:
            errors.append(str(error))
    return errors


def behind(rank: int) -> dict[str, Any]:
    """What is seen while the other rank has not come, without a wait, and after one."""
    values = torch.ones(4).cuda()
    dist.all_reduce(values)  # the communicator
    values.mul_(1)  # an emulated device waits for the first call of an operator
    if rank == 1:
        store().wait(["seen"], timedelta(seconds=PATIENCE))
        dist.all_reduce(values)
        return {"after": values.cpu()}
    torch.cuda._sleep(20_000_000)
    values.mul_(5)
    work = dist.all_reduce(values, async_op=True)
    seen: dict[str, Any] = {"before": values.cpu(), "completed": work.is_completed()}
    store().set("seen", "")
    work.wait()
    seen["after"] = values.cpu()
    seen["completed at last"] = work.is_completed()
    return seen


def first_use(rank: int) -> dict[str, Any]:
    """Whether the host waits for the other rank at the first operation, and at an eager group."""
    values = torch.ones(1).cuda()

    def begin() -> None:
        torch.cuda.set_device(rank)
        dist.all_reduce(values)
        store().set("begun", "")

    seen: dict[str, Any] = {"lazy": backend()._communicators()}
    if rank == 0:
        thread = threading.Thread(target=begin)
        thread.start()
        seen["waits"] = not _comes("begun", MOMENT)
        store().set("looked", "")
        thread.join(PATIENCE)
    else:
        store().wait(["looked"], timedelta(seconds=PATIENCE))
        begin()
    store().wait(["begun"], timedelta(seconds=PATIENCE))
    seen["made"] = backend()._communicators()
    group: Any = dist.new_group([0, 1], backend="nccl", device_id=torch.device("cuda", rank))
    seen["eager"] = group._get_backend(torch.device("cuda"))._communicators()
    return seen


def _comes(key: str, seconds: float) -> bool:
    with suppress(RuntimeError):
        store().wait([key], timedelta(seconds=seconds))
        return True
    return False


# What the two ranks do, that does not fit; and what an error has to name.
MISMATCHES: dict[str, tuple[Callable[[], Any], Callable[[], Any], tuple[str, str]]] = {
    "sizes": (
        lambda: dist.all_reduce(torch.ones(2).cuda()),
        lambda: dist.all_reduce(torch.ones(3).cuda()),
        ("all_reduce(SUM) of 2 Float", "all_reduce(SUM) of 3 Float"),
    ),
    "kinds": (
        lambda: dist.all_reduce(torch.ones(2).cuda()),
        lambda: dist.broadcast(torch.ones(2).cuda(), 0),
        ("all_reduce(SUM) of 2 Float", "broadcast of 2 Float, root 0"),
    ),
    "types": (
        lambda: dist.all_reduce(torch.ones(2).cuda()),
        lambda: dist.all_reduce(torch.ones(2).cuda().int()),
        ("all_reduce(SUM) of 2 Float", "all_reduce(SUM) of 2 Int"),
    ),
    "reductions": (
        lambda: dist.all_reduce(torch.ones(2).cuda()),
        lambda: dist.all_reduce(torch.ones(2).cuda(), dist.ReduceOp.MAX),
        ("all_reduce(SUM) of 2 Float", "all_reduce(MAX) of 2 Float"),
    ),
    "roots": (
        lambda: dist.broadcast(torch.ones(2).cuda(), 1),
        lambda: dist.broadcast(torch.ones(2).cuda(), 0),
        ("broadcast of 2 Float, root 1", "broadcast of 2 Float, root 0"),
    ),
    "messages": (
        lambda: dist.send(torch.ones(2).cuda(), 1),
        lambda: dist.recv(torch.ones(3).cuda(), 0),
        ("send of 2 Float to rank 1", "recv of 3 Float from rank 0"),
    ),
    "two sends": (
        lambda: dist.send(torch.ones(2).cuda(), 1),
        lambda: dist.send(torch.ones(2).cuda(), 0),
        ("send of 2 Float to rank 1", "send of 2 Float to rank 0"),
    ),
}


def mismatch(rank: int, name: str) -> str:
    """Returns why the device has failed."""
    import emulated_cuda

    dist.barrier(device_ids=[rank])
    try:
        MISMATCHES[name][rank]()
        torch.cuda.synchronize()
    except RuntimeError:
        text: str = emulated_cuda.fault_message()
        emulated_cuda.reset()
        return text
    return ""


def late(rank: int) -> str:
    """Returns the error of an operation whose peer does not come within its timeout."""
    values = torch.ones(1).cuda()
    dist.all_reduce(values)
    error = ""
    if rank == 0:
        work = dist.all_reduce(values, async_op=True)
        try:
            work.wait(timedelta(seconds=MOMENT))
        except RuntimeError as late:
            error = str(late)
        store().set("told", "")
    store().wait(["told"], timedelta(seconds=PATIENCE))
    return error


def _unregister() -> None:
    """The runtime's own call: torch registers no memory that exists."""
    runtime = ctypes.CDLL(None)
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(_PAGES)))
    assert runtime.cudaHostRegister(address, ctypes.c_size_t(len(_PAGES)), 0) == 0
    assert runtime.cudaHostUnregister(address) == 0


_PAGES = mmap.mmap(-1, 2**16)

# Calls that wait for the whole device.
WAITS: dict[str, Callable[[], Any]] = {
    "cudaDeviceSynchronize": torch.cuda.synchronize,
    "cudaFree": torch.cuda.empty_cache,
    "cudaHostUnregister": _unregister,
}


def dead_peer(rank: int, call: str) -> dict[str, Any]:
    """What a call that waits for the device does while a kernel waits for a rank that has ended, and after abort()."""
    values = torch.ones(4).cuda()
    dist.all_reduce(values)
    values.cpu()
    del values
    torch.empty(2**22, device="cuda")  # something to free
    if rank == 1:
        store().set("ended", "")
        os._exit(0)
    store().wait(["ended"], timedelta(seconds=PATIENCE))
    into = torch.zeros(4).cuda()
    into.cpu()
    work = dist.all_reduce(into, async_op=True)
    waiting = threading.Thread(target=WAITS[call], daemon=True)
    waiting.start()
    waiting.join(MOMENT)
    seen: dict[str, Any] = {"waits": waiting.is_alive(), "completed": work.is_completed()}
    backend().abort()
    waiting.join(PATIENCE)
    seen["waits after abort"] = waiting.is_alive()
    try:
        work.wait()
        seen["error"] = ""
    except RuntimeError as error:
        seen["error"] = str(error)
    torch.cuda.synchronize()
    seen["streams work"] = torch.ones(2).cuda().sum().item()
    try:
        dist.all_reduce(torch.ones(2).cuda())
        seen["later"] = ""
    except RuntimeError as error:
        seen["later"] = str(error)
    return seen
