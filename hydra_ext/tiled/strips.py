"""``hydra_ext.tiled.strips``: the context inside which operations on maps are made in strips."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from hydra_ext.errors import InvalidArgument, StateError
from hydra_ext.policy import SimulatedDevice, parse_bytes
from hydra_ext.tiled.devices import choose
from hydra_ext.tiled.operators import operations
from hydra_ext.tiled.run import TiledRun

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class strips:  # noqa: N801 - a verb: it is used as a function
    """Inside, operations on images larger than a strip are computed on the device strip by strip.

    The model, its parameters, the optimizer and all maps stay on the CPU; forward, loss and backward are called as
    always, all of them inside. What a strip takes on the device depends on the image's width, not on its height.

    Args:
        budget: device bytes: an int, or a text such as ``"1GiB"``. Strips are as high as half of it allows. On a
            simulated device, where larger ones are slower, their own rows take at most 64 MiB, or four times what
            every strip takes besides (its halo, the weight) where that is more.
        rows: the most rows that a strip has of any map; as many as the budget allows unless given.
        device: ``None`` takes CUDA if there is one, else a simulated device; or ``"cuda"``, ``"cuda:1"``,
            ``"simulated"``, a :class:`hydra_ext.SimulatedDevice`.

    Raises:
        InvalidBudget: The budget is not a size.
        InvalidArgument: ``rows`` is no positive whole number, or the simulated device has options of no use here.
        InvalidDevice: there is no such device.
        torch.OutOfMemoryError: inside: a strip of one row does not fit.
        UnsupportedOperation: inside: an operation on a map that strips cannot make.
        StateError: it was entered before, or inside another one on the same thread.
    """

    def __init__(
        self,
        *,
        budget: int | str,
        rows: int | None = None,
        device: SimulatedDevice | torch.device | str | None = None,
    ) -> None:
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
            raise InvalidArgument(f"rows={rows!r}: give a positive whole number, or None for as many as fit")
        self._budget = parse_bytes(budget)
        self._rows = rows
        self._device = device
        self._run: TiledRun | None = None
        self._mode: _Mode | None = None

    def __enter__(self) -> TiledRun:
        if self._run is not None:
            raise StateError("this strips context was entered before; make a new one")
        if any(isinstance(mode, _Mode) for mode in _get_current_dispatch_mode_stack()):
            raise StateError(
                "a strips context was entered inside another one on the same thread: leave that first, or use it for "
                "all that is to be made in strips"
            )
        self._run = TiledRun(choose(self._device, self._budget), budget=self._budget, rows=self._rows)
        self._mode = _Mode(self._run)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self._run

    def __exit__(
        self, type_: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mode is not None and self._run is not None:
            self._mode.__exit__(type_, error, trace)  # type: ignore[no-untyped-call]
            self._mode = None
            self._run.device.close()


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What torch calls instead of each operation, below autograd, on the thread that entered the context."""

    def __init__(self, run: TiledRun) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            if _is_composite(func):  # in inference mode it was not taken apart before
                with self:
                    return func._op_dk(_COMPOSITE, *args, **kwargs)
            return operations.make(self._run, func, args, kwargs)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"{error} It was {func} in strips: give a larger budget=, or fewer rows=; no strip is lower than a row "
                "and the halo that its kernel needs"
            ) from error


def _is_composite(func: Any) -> bool:
    """Whether torch has nothing for an operation but other operations: some have both, with other last bits."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(func.name(), _COMPOSITE.name) and not has_kernel(func.name(), "CPU")
