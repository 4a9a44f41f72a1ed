"""A step's data: given as microbatches, or as a whole that is cut into them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from hydra_ext.errors import InvalidArgument


def as_microbatches(data: Any, count: int) -> list[Any]:
    """The microbatches themselves, or those that a tensor, or a mapping of tensors, is cut into.

    A whole is cut along the first dimension of every tensor that has as many rows as most; what is no tensor, or has
    no rows, goes to all. The parts are as even as they can be, the larger ones first; there are fewer than ``count``
    where there are fewer rows.

    Raises:
        InvalidArgument: there is nothing in it, or tensors do not have the same number of rows.
    """
    if isinstance(data, (Tensor, Mapping)):
        return _cut(data, count)
    if isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
        raise InvalidArgument(
            f"microbatches is a {type(data).__name__}: give a list of microbatches, or a tensor or a mapping of "
            "tensors that is to be cut into them"
        )
    works = list(data)
    if not works:
        raise InvalidArgument("the step has no microbatches: give at least one, on every rank")
    return works


def _cut(data: Any, count: int) -> list[Any]:
    leaves, spec = pytree.tree_flatten(dict(data) if isinstance(data, Mapping) else data)
    rows = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    if len(rows) != 1:
        raise InvalidArgument(
            f"the batch's tensors have {sorted(rows) or 'no'} rows and cannot be cut into microbatches: give them the "
            "same number of rows, or a list of microbatches"
        )
    (total,) = rows
    if total == 0:
        raise InvalidArgument("the batch has no rows: give at least one, on every rank")
    parts = min(count, total)
    cut = [leaf.tensor_split(parts) if isinstance(leaf, Tensor) and leaf.dim() else (leaf,) * parts for leaf in leaves]
    return [pytree.tree_unflatten([pieces[i] for pieces in cut], spec) for i in range(parts)]
