"""A function mode that sees the calls of glue and stays hidden from the program.

``torch.overrides.has_torch_function`` is true under any function mode. Some modules of torch take a fast path, with
other numbers, only if it is false: ``nn.TransformerEncoder`` does with a padding mask. When such a module runs as
glue, it must decide as it would without this mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from hydra_ext.split.stages.tensors import Absent

_has_torch_function = torch.overrides.has_torch_function


class GlueMode(TorchFunctionMode):
    """See the module's docstring."""

    def __enter__(self) -> GlueMode:
        super().__enter__()  # type: ignore[no-untyped-call]
        _set_answer(self._answer)
        return self

    def __exit__(self, *error: Any) -> None:
        _set_answer(_has_torch_function)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @contextmanager
    def in_block(self, *, seen: bool) -> Iterator[None]:
        """Around a block: ``has_torch_function`` is torch's own function again, which compilers know.

        Args:
            seen: Whether this mode goes on seeing calls. If not, it is removed, provided that it is the innermost mode.
        """
        _set_answer(_has_torch_function)
        try:
            if seen:
                yield
            else:
                with away(self):
                    yield
        finally:
            _set_answer(self._answer)

    def _answer(self, arguments: Any) -> bool:
        with away(self):
            return _has_torch_function(arguments)


@contextmanager
def away(mode: TorchFunctionMode) -> Iterator[None]:
    """Removes the mode for the body if it is the innermost one: it sees no calls then, and costs nothing."""
    depth = torch._C._len_torch_function_stack()
    innermost = depth > 0 and torch._C._get_function_stack_at(depth - 1) is mode
    if innermost:
        _pop_mode()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if innermost:
            _push_mode(mode)  # type: ignore[no-untyped-call]


def called(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of the call. An absent parameter's ``requires_grad`` is that of the parameter it stands for."""
    if name == "__get__ requires_grad" and isinstance(args[0], Absent):
        return args[0].trainable
    return function(*args, **kwargs)


def _set_answer(answer: Callable[[Any], bool]) -> None:
    vars(torch.overrides)["has_torch_function"] = answer
