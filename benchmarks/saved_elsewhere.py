"""What others do with saved tensors, for the simulated device: copies over a link of a known speed.

On the simulated device both sides are host memory: ``.cpu()`` copies nothing there, and torch has no streams for it. So
the two ways that a stash is compared with are written down here, with the rules of the stash's own lanes: a transfer
takes what the copy takes, or its bytes by the link's speed if that is longer, and begins when the one before it has
ended. What lies on the host is not charged to the device, what comes back is.

A GPU's host runs ahead of it, and what it asks for in backward is under way before compute is there. Here the host
computes, and a request at the moment of use waits for the whole transfer: of both ways the bytes are those of a GPU,
the time is its upper bound.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hydra_ext import _C

_SET_TIMER_SLACK = 29  # of prctl


def sleep_sharply() -> None:
    """Sleeps of the calling thread end on time, as those of lanes do, and not up to 50 us late."""
    ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)


class Link:
    """One transfer after another, with the speed of one direction; None for as fast as memory copies."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Returns when the transfer has ended."""
        begin = time.perf_counter()
        target.copy_(source)
        takes = time.perf_counter() - begin
        if self._bytes_per_second is not None:
            takes = max(takes, source.nbytes / self._bytes_per_second)
        self._free_at = max(self._free_at, begin) + takes
        left = self._free_at - time.perf_counter()
        if left > 0:
            time.sleep(left)


def on_the_host(tensor: Tensor) -> Tensor:
    """Memory for a copy of it."""
    with _C.Uncharged():
        return torch.empty_like(tensor)


class SaveOnCpu(saved_tensors_hooks):
    """As :class:`torch.autograd.graph.save_on_cpu`: everything is copied when it is saved, and back when it is used.

    Parameters and small tensors, too, each as often as it is saved. Both copies are waited for.
    """

    def __init__(self, bytes_per_second: float | None) -> None:
        self._link = Link(bytes_per_second)
        sleep_sharply()
        super().__init__(self._save, self._bring)

    def _save(self, tensor: Tensor) -> Tensor:
        host = on_the_host(tensor)
        self._link.copy(host, tensor.detach())
        return host

    def _bring(self, host: Tensor) -> Tensor:
        tensor = torch.empty_like(host)
        self._link.copy(tensor, host)
        return tensor


class _Away:
    """A saved tensor on its way to the host, or there."""

    def __init__(self, source: Tensor) -> None:
        self.source: Tensor | None = source  # until the copy has ended
        self.host = on_the_host(source)
        self.leaving: Future[None] | None = None

    def let_go(self, _ended: Future[None]) -> None:
        self.source = None


class StreamedCopies:
    """Saved tensors leave on a stream beside compute, a few at a time, and come back on it when they are used.

    The idea of torchtune's activation offloading, written anew: tensors from a size on, no parameters, each as often as
    it is saved. A thread stands for the stream. If as many are under way as may be, saving waits for the oldest; what
    backward asks for before it has left is handed back as it is, anything else is copied back and waited for.
    """

    LEAST_BYTES = 1024
    MOST_LEAVING = 5

    def __init__(self, bytes_per_second: float | None) -> None:
        self._link = Link(bytes_per_second)
        self._leaving: deque[Future[None]] = deque()

    def __enter__(self) -> None:
        self._stream = ThreadPoolExecutor(1, "copies", sleep_sharply)
        self._hooks = saved_tensors_hooks(self._save, self._bring)
        self._hooks.__enter__()

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(_kind, _error, _trace)
        self._leaving.clear()
        self._stream.shutdown()

    def _save(self, tensor: Tensor) -> Tensor | _Away:
        if isinstance(tensor, nn.Parameter) or tensor.nbytes < self.LEAST_BYTES:
            return tensor.detach()
        while len(self._leaving) >= self.MOST_LEAVING:
            self._leaving.popleft().result()
        away = _Away(tensor.detach())
        away.leaving = self._stream.submit(self._link.copy, away.host, tensor.detach())
        away.leaving.add_done_callback(away.let_go)
        self._leaving.append(away.leaving)
        return away

    def _bring(self, saved: Tensor | _Away) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        source = saved.source
        if source is not None:
            return source
        tensor = torch.empty_like(saved.host)
        self._stream.submit(self._link.copy, tensor, saved.host).result()
        return tensor
