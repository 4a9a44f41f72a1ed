"""The watch over a stage's forward: its results may not depend on values or weights of other stages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_ext.errors import SplitError
from hydra_ext.split.rehearsal.operations import VALUE_OPERATIONS, Operation
from hydra_ext.split.stages.tensors import Absent, AbsentBuffer, StandIns, whole_of
from hydra_ext.state.arguments import tensors_in
from hydra_ext.state.memory import ByStorage

_HELD_ELSEWHERE = "a parameter or buffer that another stage holds"


class StandInWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows stand-ins through the operations of glue that every stage runs.

    Args:
        stand_ins: Stand-ins for values of other stages.
        absent: Parameters and buffers that the stage's own part may not read.

    Attributes:
        strict: Whether the stage's own part runs, where each read of a stand-in raises.
    """

    def __init__(self, stand_ins: StandIns, absent: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stand_ins = stand_ins
        self._marked: ByStorage[str] = ByStorage()
        for tensor in absent:
            self._marked.put(tensor, _HELD_ELSEWHERE)
        self.strict = False

    def what(self, tensor: Tensor) -> str | None:
        """What the tensor stands for, or depends on, of another stage; None for a tensor with right numbers."""
        if self._stand_ins.holds(tensor):
            return "a value of another stage"
        if isinstance(whole_of(tensor), (Absent, AbsentBuffer)):
            return _HELD_ELSEWHERE
        return self._marked.get(tensor)

    def mark(self, tensor: Tensor) -> None:
        """From now on the tensor's memory counts as a value of another stage."""
        self._marked.put(tensor, "a value of another stage")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # In a compiled function no call of glue is under way, so that calls made here would be recorded as glue.
        with torch._C.DisableTorchFunction():
            return self._watched(func, args, kwargs or {})

    def _watched(self, func: Any, args: Any, kwargs: Any) -> Any:
        operation = Operation.of(func, args, kwargs)
        missing = next((found for found in map(self.what, operation.reads) if found is not None), None)
        if missing is not None and (self.strict or operation.name in VALUE_OPERATIONS):
            raise SplitError(
                f"{operation.name} reads {missing}, which the rehearsal did not see: the forward takes another path. "
                "Let the path depend only on the microbatch's shapes, or give stages= explicitly"
            )
        result = func(*args, **kwargs)
        if missing is not None:
            for tensor in (*tensors_in(result), *operation.writes):
                self._marked.put(tensor, missing)
        self._marked.purge()
        return result
