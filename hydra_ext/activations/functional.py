"""Lets transforms of torch.func run inside a forward whose saved tensors go to a stash.

Such a transform switches hooks on saved tensors off, and refuses to if there are any. So a stash's hooks step aside
until it has ended: what is saved inside belongs to the transform, and stays on the device. Hooks of others are left
alone. A checkpoint has hooks of its own, which do not step aside, so a module with a transform is not recomputed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from hydra_ext import _C

_autograd: Any = torch._C._autograd
_graph: Any = torch.autograd.graph
_lock = threading.Lock()  # guards the variables below
_users = 0
_plain: Any = None  # torch's context manager while it is replaced
_local = threading.local()


def goes_to_a_stash(hooks: tuple[Any, Any] | None) -> bool:
    """Whether a pair of torch's hooks on saved tensors belongs to a stash."""
    return hooks is not None and isinstance(getattr(hooks[0], "__self__", None), _C.Stash)


def steps_aside(pack: Any) -> Any:
    """Marks a function that passes saved tensors on to a stash."""
    pack.steps_aside = True
    return pack


def transforms() -> int:
    """Number of transforms that the calling thread has begun."""
    return getattr(_local, "begun", 0)


def install() -> None:
    """Lets hooks step aside, until :meth:`remove` was called as often."""
    global _users, _plain
    with _lock:
        _users += 1
        if _users == 1:
            _plain, _graph.disable_saved_tensors_hooks = _graph.disable_saved_tensors_hooks, _disabled


def remove() -> None:
    global _users, _plain
    with _lock:
        _users -= 1
        if _users == 0 and _graph.disable_saved_tensors_hooks is _disabled:
            _graph.disable_saved_tensors_hooks, _plain = _plain, None


def _switched_off(message: str, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
    with _lock:
        plain = _plain
    made: AbstractContextManager[None] = plain(message, *args, **kwargs)
    return made


@contextmanager
def _disabled(message: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    _local.begun = transforms() + 1
    aside: list[tuple[Any, Any]] = []
    try:
        while (hooks := _autograd._top_saved_tensors_default_hooks(True)) is not None and _is_ours(hooks):
            _autograd._pop_saved_tensors_default_hooks()
            aside.append(hooks)
        with _switched_off(message, *args, **kwargs):
            yield
    finally:
        for pack, unpack in reversed(aside):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)


def _is_ours(hooks: tuple[Any, Any]) -> bool:
    return goes_to_a_stash(hooks) or getattr(hooks[0], "steps_aside", False)
