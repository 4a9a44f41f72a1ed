"""One run of strips: its device, the height of strips, and a report."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hydra_ext import _C
from hydra_ext.tiled.devices import StripDevice
from hydra_ext.tiled.pixels import Pixels

# A strip's estimated bytes are at most this part of the budget: the kernels' own memory is not known in advance.
_STRIPS_PER_BUDGET = 2

# Bytes of own rows for each byte of halo, if the budget allows: at most a fifth of the rows is computed twice.
_OWN_PER_HALO = 4


@dataclass(frozen=True)
class TiledReport:
    """Figures of a run.

    Attributes:
        budget_bytes: Bytes that the device may hold.
        peak_bytes: Most bytes that the device held.
        to_device_bytes: Bytes copied to the device.
        to_host_bytes: Bytes copied from the device.
        operations: Number of operations that ran in strips.
        strips: Number of strips of all these operations.
    """

    budget_bytes: int
    peak_bytes: int
    to_device_bytes: int
    to_host_bytes: int
    operations: int
    strips: int

    def __str__(self) -> str:
        peak, budget, to_device, to_host = map(
            _C.human_bytes, (self.peak_bytes, self.budget_bytes, self.to_device_bytes, self.to_host_bytes)
        )
        return (
            f"device   peak {peak} of {budget}\n"
            f"moved    {to_device} to the device, {to_host} to the host\n"
            f"strips   {self.strips} of {self.operations} operations"
        )


class TiledRun:
    """The run of ``with hydra_ext.tiled.strips(...) as run``.

    Attributes:
        device: Device that computes strips.
    """

    def __init__(self, device: StripDevice, *, budget: int, rows: int | None) -> None:
        self.device = device
        self._budget = budget
        self._rows = rows
        self._allowance = min(budget // _STRIPS_PER_BUDGET, device.most_strip_bytes)
        self._operations = 0
        self._strips = 0

    def is_map(self, tensor: torch.Tensor) -> bool:
        """Whether operations on a tensor have to run in strips: it is on the host and larger than one strip.

        Those on an image of bytes always do: only strips have its numbers.
        """
        if tensor.device.type != "cpu":
            return False
        if isinstance(tensor, Pixels):
            return True
        if self._rows is not None and tensor.dim() >= 3 and tensor.shape[-2] > self._rows:
            return True
        return tensor.numel() * tensor.element_size() > min(self._allowance, self.device.ample_bytes)

    def rows(self, height: int, strip_bytes: Callable[[int], int]) -> int:
        """Number of rows of an operation's strips: at least one, and at most the map's.

        Args:
            height: Number of rows of the map.
            strip_bytes: Function from a number of rows to the device bytes of such a strip, operands and results
                together. For 0 rows it returns the bytes that every strip takes besides, such as its halo. It never
                decreases.
        """
        rows = self.part(height, strip_bytes)
        return rows if self._rows is None else min(rows, self._rows)

    def part(self, size: int, part_bytes: Callable[[int], int]) -> int:
        """The same for any dimension, without the limit of ``rows=``, which is about rows of maps."""
        besides = part_bytes(0)
        most = min(self._allowance, besides + max(self.device.ample_bytes, _OWN_PER_HALO * besides))
        return max(1, bisect.bisect_right(range(1, size + 1), most, key=part_bytes))

    def fits(self, strip_bytes: int) -> bool:
        """Whether a strip may take this many bytes."""
        return strip_bytes <= self._allowance

    def count(self, strips: int) -> None:
        """Counts an operation and its strips."""
        self._operations += 1
        self._strips += strips

    def report(self) -> TiledReport:
        """The figures so far."""
        return TiledReport(
            budget_bytes=self._budget,
            peak_bytes=self.device.peak_bytes,
            to_device_bytes=self.device.to_device_bytes,
            to_host_bytes=self.device.to_host_bytes,
            operations=self._operations,
            strips=self._strips,
        )


class Handler(Protocol):
    """Runs one operation of torch, as autograd calls it, in strips."""

    def __call__(self, run: TiledRun, func: Any, /, *args: Any, **kwargs: Any) -> Any: ...


def row_bytes(tensor: torch.Tensor) -> int:
    """Bytes of one row (N, C, 1, W) of a map (N, C, H, W)."""
    return tensor.numel() // max(1, tensor.shape[-2]) * tensor.element_size()


def made_of(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The result that an operation would have, as shapes, strides and dtypes without data. Raises its own errors."""

    def without_data(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    args, kwargs = torch.utils._pytree.tree_map(without_data, (args, kwargs))
    return func(*args, **kwargs)
