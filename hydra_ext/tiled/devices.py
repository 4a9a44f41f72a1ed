"""Devices that compute strips: copies to and from them, and their budgets.

Maps are ordinary tensors on the host. A :class:`StripDevice` copies rows of them to the device, and results back. While
it is entered, allocations on the device count in the budget. No others do.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from types import TracebackType

import torch

from hydra_ext import _C, _build_info
from hydra_ext.errors import InvalidArgument, InvalidDevice
from hydra_ext.policy import SimulatedDevice
from hydra_ext.tiled.formats import empty_map
from hydra_ext.tiled.geometry import Rows
from hydra_ext.tiled.pixels import Pixels


class StripDevice(ABC):
    """One device. Enter it to allocate on it; one thread at a time.

    Attributes:
        device: Device of the strips' tensors.
        most_strip_bytes: Most bytes of one strip, operands and results together, whatever the budget.
        ample_bytes: Most bytes of a strip's own rows, unless its halo takes a large part of that.
        to_device_bytes: Bytes copied to the device so far.
        to_host_bytes: Bytes copied from the device so far.
    """

    # Kernel libraries count a tensor's elements in 32 bits. A strip has no more bytes, and so no more elements.
    most_strip_bytes = 2**31 - 1
    ample_bytes = most_strip_bytes

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.to_device_bytes = 0
        self.to_host_bytes = 0

    @abstractmethod
    def __enter__(self) -> None: ...

    @abstractmethod
    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Ends allocations, and undoes changes that were made for the budget."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """Most bytes that the device held."""

    @abstractmethod
    def _copy_in(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies to the device, with the same shape and dtype, in the order of the device's work."""

    @abstractmethod
    def _copy_out(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies to the host, with the same shape and dtype. The bytes may arrive later; :meth:`settle` waits."""

    def settle(self) -> None:  # noqa: B027 - synchronous copies need no wait
        """Waits for all stored strips to reach the host."""

    def load(self, source: torch.Tensor, rows: Rows | None = None, *, dim: int = -2) -> torch.Tensor:
        """Copies rows of a host tensor along ``dim``, or all of it, to a dense tensor of the same memory format."""
        view = source.unchanged() if isinstance(source, Pixels) else source
        if rows is not None:
            view = view.narrow(dim, rows.begin, rows.count)
        strip = empty_map(view.shape, view.dtype, view, device=self.device)
        self._copy_in(strip, view)
        self.to_device_bytes += strip.nbytes
        return source.normalised(strip) if isinstance(source, Pixels) else strip

    def store(self, strip: torch.Tensor, target: torch.Tensor, rows: Rows, *, dim: int = -2) -> None:
        """Copies a strip into rows of a host tensor."""
        self._copy_out(target.narrow(dim, rows.begin, rows.count), strip)
        self.to_host_bytes += strip.nbytes


class SimulatedStrips(StripDevice):
    """Host memory with a budget that the allocator enforces to the byte. Its link can be given speeds."""

    # The system gives larger tensors fresh pages each time. A step on 512 x 16384 pixels takes 10.8 s of processor time
    # in strips of up to 512 MiB, and 6.4 s in strips of up to 64 MiB.
    ample_bytes = 64 * 2**20

    def __init__(self, budget: int, options: SimulatedDevice) -> None:
        super().__init__(torch.device("cpu"))
        self._charged = _C.Charged(budget)
        self._options = options

    def __enter__(self) -> None:
        self._charged.__enter__()

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._charged.__exit__(_type, _error, _trace)

    def close(self) -> None:
        """Does nothing: only allocations inside the context are charged."""

    @property
    def peak_bytes(self) -> int:
        return self._charged.ledger.peak

    def _copy_in(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._copy(target, source, self._options.to_device_bytes_per_second)

    def _copy_out(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._copy(target, source, self._options.to_host_bytes_per_second)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, bytes_per_second: float | None) -> None:
        begin = time.perf_counter()
        target.copy_(source)
        takes = self._options.latency_seconds + (source.nbytes / bytes_per_second if bytes_per_second else 0.0)
        left = begin + takes - time.perf_counter()
        if left > 0:
            time.sleep(left)


class CudaStrips(StripDevice):
    """A GPU. torch's allocator may reserve as many bytes there as the budget.

    Maps are too large to be pinned one by one: torch rounds each pinned block up to a power of two. So rows pass
    through two pinned buffers for each direction. The host fills or empties one of them while the device works.
    """

    def __init__(self, budget: int, device: torch.device) -> None:
        super().__init__(device)
        _, total = torch.cuda.mem_get_info(device)
        self._fraction_before = torch.cuda.get_per_process_memory_fraction(device)
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), device)
        torch.cuda.reset_peak_memory_stats(device)
        self._incoming = _PinnedPair()
        self._outgoing = _PinnedPair()
        self._copies: list[_Outgoing] = []

    def __enter__(self) -> None:
        pass  # the memory fraction is in force from the constructor to close()

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if _type is not None:
            self._copies.clear()  # the error abandons their maps

    def close(self) -> None:
        self._copies.clear()
        torch.cuda.set_per_process_memory_fraction(self._fraction_before, self.device)

    @property
    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_reserved(self.device))

    def _copy_in(self, target: torch.Tensor, source: torch.Tensor) -> None:
        buffer = self._incoming.take(source)
        buffer.bytes.copy_(source)
        target.copy_(buffer.bytes, non_blocking=True)
        buffer.used.record(torch.cuda.current_stream(self.device))

    def _copy_out(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # There are two buffers: before a third copy begins, the first one has to be emptied.
        while len(self._copies) >= 2:
            self._copies.pop(0).finish()
        buffer = self._outgoing.take(source)
        buffer.bytes.copy_(source, non_blocking=True)
        buffer.used.record(torch.cuda.current_stream(self.device))
        self._copies.append(_Outgoing(buffer, target))

    def settle(self) -> None:
        while self._copies:
            self._copies.pop(0).finish()


class _Pinned:
    """One use of a pinned buffer: its bytes in a strip's shape, and the event after the device's last use."""

    def __init__(self, buffer: torch.Tensor, like: torch.Tensor, used: torch.cuda.Event) -> None:
        self.bytes = buffer[: like.nbytes].view(like.dtype).view(like.shape)
        self.used = used


class _PinnedPair:
    """Two pinned buffers that are used in turn, as large as the largest strip so far."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]
        self._next = 0

    def take(self, like: torch.Tensor) -> _Pinned:
        turn, self._next = self._next, 1 - self._next
        self._events[turn].synchronize()
        if self._buffers[turn].numel() < like.nbytes:
            self._buffers[turn] = torch.empty(like.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        return _Pinned(self._buffers[turn], like, self._events[turn])


class _Outgoing:
    """A strip on its way to the host, in a pinned buffer."""

    def __init__(self, buffer: _Pinned, target: torch.Tensor) -> None:
        self._buffer = buffer
        self._target = target

    def finish(self) -> None:
        self._buffer.used.synchronize()
        self._target.copy_(self._buffer.bytes)


# Options of SimulatedDevice without effect on strips, which neither page nor update.
_UNUSED = ("host_memory_bytes_per_second", "asynchronous", "seed", "faults")


def choose(device: SimulatedDevice | torch.device | str | None, budget: int) -> StripDevice:
    """The device for the argument of ``strips(device=...)``.

    Raises:
        InvalidDevice: The device does not exist, or torch cannot use it.
        InvalidArgument: A simulated device has options without effect here.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "simulated"
    if device == "simulated":
        device = SimulatedDevice()
    if isinstance(device, SimulatedDevice):
        given = [name for name in _UNUSED if getattr(device, name) != getattr(SimulatedDevice(), name)]
        if given:
            raise InvalidArgument(f"SimulatedDevice({given[0]}=...) has no effect on strips: leave it out")
        return SimulatedStrips(budget, device)
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidDevice(f"device={device!r} is not a device: give 'cuda', 'cuda:1' or 'simulated'") from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    given_index: int | None = parsed.index
    if parsed.type != "cuda" or count <= (given_index or 0):
        raise InvalidDevice(
            f"device={device!r}: strips are computed on 'cuda', of which torch {_build_info.TORCH} finds {count}, or "
            "on the 'simulated' device"
        )
    index = torch.cuda.current_device() if given_index is None else given_index
    return CudaStrips(budget, torch.device("cuda", index))
