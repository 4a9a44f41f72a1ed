"""Marks functions that torch.compile must not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

Function = TypeVar("Function", bound=Callable[..., Any])


def not_traced(function: Function) -> Function:
    """Runs ``function`` without tracing it, while the functions that it calls are compiled as usual.

    ``torch.compiler.disable(recursive=False)`` does the same, but imports torch's compiler. That would make
    ``import hydra_ext`` seconds slower.
    """
    return _left_alone(function, eval_frame._FrameAction.DEFAULT)


def nothing_traced(function: Function) -> Function:
    """Runs ``function`` and all that it calls without tracing. With fullgraph=True Dynamo raises at its call."""
    return _left_alone(function, eval_frame._FrameAction.SKIP)


def _left_alone(function: Function, inside: eval_frame._FrameAction) -> Function:
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, inside)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function
