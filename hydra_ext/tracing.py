"""What torch.compile is to leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

Function = TypeVar("Function", bound=Callable[..., Any])


def not_traced(function: Function) -> Function:
    """Runs ``function`` as it is, while what it calls is compiled as usual.

    ``torch.compiler.disable(recursive=False)`` does the same, but imports torch's compiler, which takes seconds:
    ``import hydra_ext`` would take them.
    """
    return _left_alone(function, eval_frame._FrameAction.DEFAULT)


def nothing_traced(function: Function) -> Function:
    """Runs ``function``, and all that it calls, as it is. Dynamo raises at what it cannot trace with fullgraph=True."""
    return _left_alone(function, eval_frame._FrameAction.SKIP)


def _left_alone(function: Function, inside: eval_frame._FrameAction) -> Function:
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, inside)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function
