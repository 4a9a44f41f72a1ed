"""Saves memory that existed before a run just before the run first writes to it, so that the run can be undone."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_ext.split.rehearsal.operations import Operation
from hydra_ext.state.arguments import tensors_in
from hydra_ext.state.memory import ByStorage, Undo, storage_key


class ChangeWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports each write to ``undo``, except writes to memory that was allocated inside."""

    def __init__(self, undo: Undo) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._undo = undo
        self._made: ByStorage[bool] = ByStorage()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            operation = Operation.of(func, args, kwargs or {})
            for tensor in operation.writes:
                if self._made.get(tensor) is None:
                    self._undo.before_write(tensor)
            given = {storage_key(tensor) for tensor in operation.tensors} | {each._cdata for each in _storages(args)}
            result = func(*args, **(kwargs or {}))
            for tensor in tensors_in(result):
                if storage_key(tensor) not in given:
                    self._made.put(tensor, True)
            return result


def _storages(args: tuple[Any, ...]) -> list[torch.UntypedStorage]:
    """Those that an operator such as ``set_`` puts tensors on."""
    untyped = (arg._untyped_storage if isinstance(arg, torch.TypedStorage) else arg for arg in args)
    return [each for each in untyped if isinstance(each, torch.UntypedStorage)]
