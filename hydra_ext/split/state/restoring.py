"""A model's modules, or a microbatch, as they were: attributes, and all that is reached from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hydra_ext.errors import SplitError
from hydra_ext.state.snapshot import Snapshot


@contextmanager
def unchanged(model: nn.Module, microbatch: Any) -> Iterator[None]:
    """Puts back afterwards what is set, replaced, added or removed in any module, in the microbatch, and in whatever
    they hold.

    Raises:
        SplitError: an iterator there has gone on.
    """
    before = Snapshot(model, microbatch)
    try:
        yield
    finally:
        before.restore()
    refuse_iterators(before)


def refuse_iterators(before: Snapshot) -> None:
    """
    Raises:
        SplitError: one has gone on since.
    """
    for iterator in before.moved_iterators():
        raise SplitError(
            f"the forward takes from a {type(iterator).__name__} that a module, or the microbatch, holds, which a "
            "forward that does not count cannot put back: count in a number instead, take what it gives outside of "
            "the model, or give stages= explicitly"
        )
