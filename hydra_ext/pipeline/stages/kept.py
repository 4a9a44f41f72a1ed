"""A microbatch for a forward that is run twice: by then the caller may have filled its tensors with the next one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hydra_ext.errors import StateError
from hydra_ext.pipeline.ranks.channel import write_counts
from hydra_ext.state.copies import copied_together, sharing


def twice(microbatch: Any) -> Iterator[Any]:
    """The microbatch, then a copy from before its first forward, which may have written to it, too.

    Raises:
        StateError: from the second: a tensor in it that requires a gradient, and therefore is no copy, has changed.
    """
    kept = _Copy(microbatch)
    yield microbatch
    del microbatch
    kept.check()
    yield kept.made


class _Copy:
    """Of tensors in nested containers, and in attributes of objects there; what is deeper in objects is not copied.

    What shares memory with a tensor that requires a gradient is no copy, either.
    """

    def __init__(self, microbatch: Any) -> None:
        found: dict[int, Tensor] = {}
        _mapped(microbatch, lambda tensor: found.setdefault(id(tensor), tensor))
        self._themselves: list[Tensor] = []
        for group in sharing(found.values()):
            if any(tensor.requires_grad for tensor in group):
                self._themselves += group
            else:
                found.update(zip(map(id, group), copied_together(group), strict=True))
        self._counts = write_counts(self._themselves)
        self.made = _mapped(microbatch, lambda tensor: found[id(tensor)])

    def check(self) -> None:
        if write_counts(self._themselves) != self._counts:
            raise StateError(
                "a tensor of a microbatch was written to before its forward was run again, as recompute=True does just "
                "before the backward: write to it after the next step, or after pipe.drain()"
            )


def _mapped(value: Any, change: Callable[[Tensor], Tensor], *, objects: bool = True) -> Any:
    def leaf(held: Any) -> Any:
        if isinstance(held, Tensor):
            return change(held)
        attributes = getattr(held, "__dict__", {})
        if not objects or not any(isinstance(each, Tensor) for each in tree_leaves(attributes)):
            return held
        made = copy.copy(held)
        made.__dict__.update(_mapped(dict(attributes), change, objects=False))
        return made

    leaves, tree = tree_flatten(value)
    return tree_unflatten(list(map(leaf, leaves)), tree)
