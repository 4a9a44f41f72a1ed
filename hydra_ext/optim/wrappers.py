"""Optimizers inside the wrappers that other libraries put around them."""

from __future__ import annotations

from typing import Any

_HOOKS = "_optimizer_step_pre_hooks"


def unwrapped(optimizer: Any) -> Any:
    """The optimizer that makes the steps.

    A wrapper has it as its attribute ``optimizer``, and shares its state and its hooks, unless it has no hooks. An
    optimizer around another one, such as Lookahead, has state of its own. So it is no wrapper.
    """
    inner = getattr(optimizer, "optimizer", None)
    while inner is not None and inner is not optimizer and _shares(optimizer, inner):
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer


def is_made(optimizer: Any) -> bool:
    """Whether the constructor of torch's class was called."""
    return _hooks(optimizer) is not None


def _shares(optimizer: Any, inner: Any) -> bool:
    state = getattr(optimizer, "state", None)
    return state is not None and state is getattr(inner, "state", None) and _hooks(optimizer) in (None, _hooks(inner))


def _hooks(optimizer: Any) -> int | None:
    """Identity of its hooks; None without any."""
    hooks = getattr(optimizer, "__dict__", {}).get(_HOOKS)
    return None if hooks is None else id(hooks)
