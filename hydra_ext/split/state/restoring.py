"""Restores the attributes of a model's modules and of a microbatch, and all objects that are reached from them.

The numbers of tensors are restored elsewhere (:class:`hydra_ext.state.memory.Undo`), after the places that they are in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hydra_ext.errors import SplitError
from hydra_ext.state.memory import Places
from hydra_ext.state.snapshot import Snapshot


@contextmanager
def unchanged(model: nn.Module, microbatch: Any) -> Iterator[None]:
    """Undoes the body's assignments, additions and removals in modules, in the microbatch, and in objects they hold.

    Their tensors lie in the same memory as before, whatever ``.data``, ``set_()`` or ``resize_()`` were used for.

    Raises:
        SplitError: The body has advanced an iterator that one of them holds.
    """
    before = Snapshot(model, microbatch)
    places = Places(before.tensors)
    try:
        yield
    finally:
        before.restore()
        places.restore()
    refuse_iterators(before)


def refuse_iterators(before: Snapshot) -> None:
    """
    Raises:
        SplitError: An iterator in the snapshot has advanced since.
    """
    for iterator in before.moved_iterators():
        raise SplitError(
            f"the forward advances a {type(iterator).__name__} that a module, or the microbatch, holds, and a "
            "rehearsal cannot move it back: count in a number instead, take its items outside of the model, or give "
            "stages= explicitly"
        )
