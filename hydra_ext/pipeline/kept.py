"""A microbatch for a forward that is run twice: by then the caller may have filled its tensors with the next one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hydra_ext.errors import StateError
from hydra_ext.pipeline.channel import write_counts
from hydra_ext.state.layout import copied


def twice(microbatch: Any) -> Iterator[Any]:
    """The microbatch, then a copy from before its first forward, which may have written to it, too.

    Raises:
        StateError: from the second: a tensor in it that requires a gradient, and therefore is no copy, has changed.
    """
    kept = _Copy()
    copied = kept.of(microbatch)
    yield microbatch
    del microbatch
    kept.check()
    yield copied


class _Copy:
    """Of tensors in nested containers, and in attributes of objects there; what is deeper in objects is not copied."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        self._themselves: list[Tensor] = []
        self._counts: list[int] = []

    def of(self, value: Any, *, objects: bool = True) -> Any:
        leaves, tree = tree_flatten(value)
        return tree_unflatten([self._leaf(leaf, objects) for leaf in leaves], tree)

    def _leaf(self, leaf: Any, objects: bool) -> Any:
        if isinstance(leaf, Tensor):
            return self._tensor(leaf)
        attributes = getattr(leaf, "__dict__", {})
        if not objects or not any(isinstance(each, Tensor) for each in tree_leaves(attributes)):
            return leaf
        made = copy.copy(leaf)
        made.__dict__.update(self.of(dict(attributes), objects=False))
        return made

    def _tensor(self, tensor: Tensor) -> Tensor:
        """One in several places is one again."""
        if tensor.requires_grad:
            self._themselves.append(tensor)
            self._counts += write_counts([tensor])
            return tensor
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor, copied(tensor)
        return self._made[id(tensor)][1]

    def check(self) -> None:
        self._made.clear()
        if write_counts(self._themselves) != self._counts:
            raise StateError(
                "a tensor of a microbatch was written to before its forward was run again, as recompute=True does just "
                "before the backward: write to it after the next step, or after pipe.drain()"
            )
