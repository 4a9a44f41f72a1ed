"""``hydra_ext.tiled.strips``: the context in which operations on maps run in strips."""

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
    """Computes operations on images larger than a strip on the device, strip by strip.

    The model, its parameters, the optimizer and all maps stay on the CPU. Forward, loss and backward are called as
    always, all of them inside. A strip's device memory depends on the image's width, not on its height.

    Args:
        budget: Device bytes: an int, or a text such as ``"1GiB"``. Strips are as high as half of it allows. On a
            simulated device, where larger ones are slower, their own rows take at most 64 MiB, or four times the bytes
            that every strip takes besides (its halo, the weight), if that is more.
        rows: Most rows of a strip, for any map; by default as many as the budget allows.
        device: ``"cuda"``, ``"cuda:1"``, ``"simulated"`` or a :class:`hydra_ext.SimulatedDevice`. ``None`` takes CUDA
            if there is one, otherwise a simulated device.

    Raises:
        InvalidBudget: The budget is not a size.
        InvalidArgument: ``rows`` is not a positive whole number, or the simulated device has options without effect
            here.
        InvalidDevice: The device does not exist.
        torch.OutOfMemoryError: Inside: a strip of one row does not fit.
        UnsupportedOperation: Inside: an operation on a map cannot run in strips.
        StateError: The context was entered before, or inside another one on the same thread.
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
                "a strips context was entered inside another one on the same thread: leave that first, or use the "
                "outer one for all operations"
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
    """Torch calls this in place of each operation, below autograd, on the thread that entered the context."""

    def __init__(self, run: TiledRun) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            if _is_composite(func):  # in inference mode torch has not decomposed it before
                with self:
                    return func._op_dk(_COMPOSITE, *args, **kwargs)
            return operations.make(self._run, func, args, kwargs)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"{error} It was {func} in strips: give a larger budget=, or fewer rows=; a strip has at least one row "
                "and the halo that its kernel needs"
            ) from error


def _is_composite(func: Any) -> bool:
    """Whether torch can only decompose an operation. Some have a kernel as well, with other last bits."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(func.name(), _COMPOSITE.name) and not has_kernel(func.name(), "CPU")
