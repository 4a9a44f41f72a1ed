"""One run of strips: its device, how high strips are, and what it has done."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hydra_ext import _C
from hydra_ext.tiled.devices import StripDevice
from hydra_ext.tiled.pixels import Pixels

# What a strip is reckoned to take is at most this part of the budget: what kernels need besides is not known ahead.
_STRIPS_PER_BUDGET = 2

# Own rows for each halo, in bytes, where the budget allows: of what is computed, a fifth is computed twice at most.
_OWN_PER_HALO = 4


@dataclass(frozen=True)
class TiledReport:
    """What a run did. Bytes are bytes.

    Attributes:
        budget_bytes: what the device may hold.
        peak_bytes: what it held at most.
        to_device_bytes: copied to it.
        to_host_bytes: copied from it.
        operations: that were made in strips.
        strips: that they were made in.
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
    """What ``with hydra_ext.tiled.strips(...) as run`` gives.

    Attributes:
        device: where strips are computed.
    """

    def __init__(self, device: StripDevice, *, budget: int, rows: int | None) -> None:
        self.device = device
        self._budget = budget
        self._rows = rows
        self._allowance = min(budget // _STRIPS_PER_BUDGET, device.most_strip_bytes)
        self._operations = 0
        self._strips = 0

    def is_map(self, tensor: torch.Tensor) -> bool:
        """Whether operations on a tensor have to be made in strips: it is on the host and more than one strip.

        An image of bytes always is: only strips have its numbers.
        """
        if tensor.device.type != "cpu":
            return False
        if isinstance(tensor, Pixels):
            return True
        if self._rows is not None and tensor.dim() >= 3 and tensor.shape[-2] > self._rows:
            return True
        return tensor.numel() * tensor.element_size() > min(self._allowance, self.device.ample_bytes)

    def rows(self, height: int, strip_bytes: Callable[[int], int]) -> int:
        """How many rows a strip of an operation has: at least one, and no more than the map.

        Args:
            height: the map's rows.
            strip_bytes: what a strip of so many rows takes on the device, operands and results together. Of no rows it
                is what every strip takes besides, such as its halo. Never less for more rows.
        """
        rows = self.part(height, strip_bytes)
        return rows if self._rows is None else min(rows, self._rows)

    def part(self, size: int, part_bytes: Callable[[int], int]) -> int:
        """Likewise how much of any dimension goes to the device at once: ``rows=`` is about maps' rows."""
        besides = part_bytes(0)
        most = min(self._allowance, besides + max(self.device.ample_bytes, _OWN_PER_HALO * besides))
        return max(1, bisect.bisect_right(range(1, size + 1), most, key=part_bytes))

    def fits(self, strip_bytes: int) -> bool:
        """Whether a strip may take so much."""
        return strip_bytes <= self._allowance

    def count(self, strips: int) -> None:
        """An operation was made in so many strips."""
        self._operations += 1
        self._strips += strips

    def report(self) -> TiledReport:
        """What was done so far."""
        return TiledReport(
            budget_bytes=self._budget,
            peak_bytes=self.device.peak_bytes,
            to_device_bytes=self.device.to_device_bytes,
            to_host_bytes=self.device.to_host_bytes,
            operations=self._operations,
            strips=self._strips,
        )


class Handler(Protocol):
    """Makes one operation of torch, as autograd calls it, in strips."""

    def __call__(self, run: TiledRun, func: Any, /, *args: Any, **kwargs: Any) -> Any: ...


def row_bytes(tensor: torch.Tensor) -> int:
    """Bytes of one row (N, C, 1, W) of a map (N, C, H, W)."""
    return tensor.numel() // max(1, tensor.shape[-2]) * tensor.element_size()


def made_of(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What an operation would make of its arguments: no data, but shapes, strides and dtypes; or its own error."""

    def without_data(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    args, kwargs = torch.utils._pytree.tree_map(without_data, (args, kwargs))
    return func(*args, **kwargs)
