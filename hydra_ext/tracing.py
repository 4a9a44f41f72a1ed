"""What torch.compile is to leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

Function = TypeVar("Function", bound=Callable[..., Any])


def not_traced(function: Function) -> Function:
    """Runs ``function`` as it is, while what it calls is compiled as usual.

    ``torch.compiler.disable(recursive=False)`` does the same, but imports torch's compiler: seconds that everyone
    would wait who imports hydra_ext.
    """
    action = eval_frame._FrameAction
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function
