"""The kind of a microbatch. All microbatches of one kind take the same path through the model, unless values decide."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from hydra_ext.split.rehearsal.record import PLAIN
from hydra_ext.split.stages.tensors import Absent
from hydra_ext.state.arguments import named_tensors, opened
from hydra_ext.state.copies import sharing
from hydra_ext.state.layout import order_of


def signature_of(model: nn.Module, fn: Callable[[Any], Any], microbatch: Any) -> Hashable:
    """The kind of the microbatch, as a value that can be compared and hashed.

    Of the microbatch it contains:

    - its structure and its Python numbers;
    - the tensors' shapes, dtypes and orders in memory;
    - which tensors share memory, and which need a gradient.

    It also contains the code of ``fn``, and the modes that a forward sees: ``training``, trainable parameters, grad
    mode, default dtype and autocast. Mappings and dataclasses count by their members; any other object that is neither
    a tensor nor a plain value counts by its type.
    """
    modes = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    return (
        _kind(microbatch),
        _shared(microbatch),
        _code(fn),
        tuple(module.training for module in model.modules()),
        tuple(_is_trainable(parameter) for parameter in model.parameters()),
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
        modes,
    )


def _kind(value: Any) -> Hashable:
    leaves, tree = tree_flatten(value)
    return tree, tuple(_leaf(leaf) for leaf in leaves)


def _shared(microbatch: Any) -> Hashable:
    """Two numbers for each tensor: the first is equal for tensors that share memory, the second for one tensor in
    several places. A write to one tensor of a group is a write to the others, too."""
    tensors = [tensor for _, tensor in named_tensors(microbatch)]
    one: dict[int, int] = {}
    for number, tensor in enumerate(tensors):
        one.setdefault(id(tensor), number)
    memory = {id(tensor): number for number, group in enumerate(sharing(tensors)) for tensor in group}
    return tuple((memory[id(tensor)], one[id(tensor)]) for tensor in tensors)


def _is_trainable(parameter: nn.Parameter) -> bool:
    return parameter.trainable if isinstance(parameter, Absent) else parameter.requires_grad


def _leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), order_of(leaf), leaf.dtype, leaf.requires_grad)
    kind: Any = type(leaf)
    content = opened(leaf)
    if content is not None:
        return (kind, tuple(content), tuple(_kind(held) for held in content.values()))
    return (kind, leaf) if isinstance(leaf, PLAIN) else kind


def _code(fn: Callable[[Any], Any]) -> Hashable:
    """The code of the function, which stays the same if the program defines the function anew in every step."""
    while isinstance(fn, partial):
        fn = fn.func
    function = getattr(fn, "__func__", fn)
    kind: Any = type(fn)
    code: Hashable = getattr(function, "__code__", kind)
    return code
