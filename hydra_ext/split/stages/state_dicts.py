"""Makes ``state_dict()`` raise for modules that lack tensors, or whose weights have updates under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakMethod

from torch import nn
from torch.utils.hooks import RemovableHandle

from hydra_ext.errors import StateError
from hydra_ext.split.stages.stand_ins import is_absent

_here = threading.local()


def refuse_state_dicts(model: nn.Module, *, whole: bool) -> None:
    """From now on ``state_dict()`` raises for every module that has an absent parameter or buffer.

    Args:
        whole: Whether this rank has all stages. If not, the model's own ``state_dict()`` always raises: the right copy
            of a buffer may be on another rank.
    """
    if not whole:
        model.register_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]
    for module in model.modules():
        if module is not model or whole:
            module.register_state_dict_pre_hook(_refuse_if_absent)  # type: ignore[no-untyped-call]


def refuse_while_under_way(model: nn.Module, check: Callable[[str], None]) -> RemovableHandle:
    """The model's ``state_dict()`` raises whenever ``check`` does: a bound method, whose object is not kept alive."""
    handle: RemovableHandle = model.register_state_dict_pre_hook(_WhileUnderWay(check))  # type: ignore[no-untyped-call]
    return handle


@contextmanager
def permitted() -> Iterator[None]:
    """Inside, ``state_dict()`` does not raise in this thread: the caller knows which tensors are absent."""
    _here.permitted = True
    try:
        yield
    finally:
        _here.permitted = False


def _refuse(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if getattr(_here, "permitted", False):
        return
    raise StateError(
        "this rank holds only its own stages of the model, so that model.state_dict() would lack the other stages' "
        "tensors: call pipe.state_dict(), which has this rank's"
    )


def _refuse_if_absent(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if any(is_absent(tensor) for tensor in (*module.parameters(), *module.buffers())):
        _refuse(module, prefix, keep_vars)


class _WhileUnderWay:
    """The hook. A copy of the model, or a saved model, has a hook without a check: no update is under way there."""

    def __init__(self, check: Callable[[str], None] | None = None) -> None:
        self._check = None if check is None else WeakMethod(check)

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        check = None if self._check is None else self._check()
        if check is not None:
            check("model.state_dict()")

    def __reduce__(self) -> tuple[Any, ...]:
        return _WhileUnderWay, ()
