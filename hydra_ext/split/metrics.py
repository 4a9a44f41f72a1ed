"""Metrics that ``fn`` returns beside the loss: tensors, in containers and in objects of the user's own classes."""

from __future__ import annotations

import copy
from enum import Enum
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hydra_ext.split.rehearsal.record import PLAIN
from hydra_ext.split.state.held import Root, entries, is_object, members
from hydra_ext.state.contents import attributes_of

_WITHOUT_TENSORS = (*PLAIN, bytes, Enum, np.ndarray, np.generic, type)


def tensors_inside(value: Any) -> list[Tensor]:
    """The tensors in it, also those in attributes of objects."""
    return [member for member in _leaves(value) if isinstance(member, Tensor)]


def unsearched(value: Any) -> str | None:
    """The type name of a member that may hold tensors which :func:`tensors_inside` does not find; None without one."""
    return next(
        (
            type(member).__name__
            for member in _leaves(value)
            if not isinstance(member, (Tensor, *_WITHOUT_TENSORS)) and members(member) is None
        ),
        None,
    )


def without_graph(value: Any) -> Any:
    """The same value with detached tensors. An object that holds tensors with a graph is copied, not changed."""
    if isinstance(value, Tensor):
        return value.detach()
    return tree_map(_object_without_graph, value)


def _object_without_graph(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, PLAIN) or not is_object(value) or not any(t.requires_grad for t in tensors_inside(value)):
        return value
    made = copy.copy(value)
    for name, member in attributes_of(value).items():
        object.__setattr__(made, name, without_graph(member))
    return made


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, (Tensor, *_WITHOUT_TENSORS)):
            found.append(leaf)
        else:
            found += [entry.value for entry in entries([Root("", None, "", leaf)])]
    return found
