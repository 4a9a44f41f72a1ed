"""Keeps a microbatch for a forward that runs twice: meanwhile the caller may reuse the microbatch's tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from hydra_ext.errors import StateError
from hydra_ext.pipeline.ranks.channel import write_counts
from hydra_ext.state.arguments import Arguments
from hydra_ext.state.copies import copied_together, sharing


def twice(microbatch: Any) -> Iterator[Any]:
    """Yields the microbatch, then a copy that was made before the first forward, which may write to the microbatch.

    A tensor that requires a gradient is not copied: both have the tensor itself.

    Raises:
        StateError: When the copy is taken: a tensor that was not copied has changed.
    """
    kept = _Copy(microbatch)
    yield microbatch
    del microbatch
    kept.check()
    yield kept.made


class _Copy:
    """A deep copy of a microbatch's tensors, containers and objects.

    Tensors that share memory with one that requires a gradient are not copied.
    """

    def __init__(self, microbatch: Any) -> None:
        arguments = Arguments(microbatch)
        found = {id(tensor): tensor for tensor in arguments.tensors}
        self._themselves: list[Tensor] = []
        for group in sharing(arguments.tensors):
            if any(tensor.requires_grad for tensor in group):
                self._themselves += group
            else:
                found.update(zip(map(id, group), copied_together(group), strict=True))
        self._counts = write_counts(self._themselves)
        self.made = arguments.filled([found[id(tensor)] for tensor in arguments.tensors])

    def check(self) -> None:
        if write_counts(self._themselves) != self._counts:
            raise StateError(
                "a tensor of a microbatch was written to before its forward was run again, as recompute=True does just "
                "before the backward: write to it after the next step, or after pipe.drain()"
            )
