"""Optimizers inside the wrappers that other libraries put around them."""

from __future__ import annotations

from typing import Any

_HOOKS = "_optimizer_step_pre_hooks"


def unwrapped(optimizer: Any) -> Any:
    """The optimizer that makes the steps.

    A wrapper has it as its attribute ``optimizer``, and no hooks beside its hooks: either its own constructor did not
    make any, or it shares them. An optimizer around another one, such as Lookahead, has hooks and state of its own. So
    it is no wrapper.
    """
    inner = getattr(optimizer, "optimizer", None)
    while inner is not None and inner is not optimizer and _hooks(optimizer) in (None, _hooks(inner)):
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer


def _hooks(optimizer: Any) -> int | None:
    """Identity of its hooks; None without any."""
    hooks = getattr(optimizer, "__dict__", {}).get(_HOOKS)
    return None if hooks is None else id(hooks)
