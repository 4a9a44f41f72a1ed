"""Seconds of operators, from what they compute and what they read and write."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter
from torch.utils._pytree import tree_leaves

from hydra_ext.profile.cards import Speed

_ATTENTION_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def seconds_of(operator: tuple[Any, tuple[Any, ...], dict[str, Any], Any], speed: Speed) -> float:
    """Seconds of an operator: of computing, or of moving its bytes if that takes longer.

    Args:
        operator: The function, its arguments, its named arguments, and its result.
    """
    func, args, kwargs, out = operator
    moved = _moved_bytes(func, args, kwargs, out)
    if not moved:
        return 0.0
    return max(_flops(func, args, kwargs, out) / speed.flops_per_second, moved / speed.bytes_per_second)


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    packet = getattr(func, "_overloadpacket", None)
    counted = flop_counter.flop_registry.get(packet)
    if counted is not None:
        return int(counted(*args, **kwargs, out_val=out))
    if packet is _ATTENTION_ON_CPU:
        query, key, value = (tensor.shape for tensor in args[:3])
        return int(flop_counter.sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]
    if packet is _ATTENTION_BACKWARD_ON_CPU:
        gradient, query, key, value = (tensor.shape for tensor in args[:4])
        return int(flop_counter.sdpa_backward_flop_count(gradient, query, key, value))  # type: ignore[no-untyped-call]
    return 0


def _moved_bytes(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes that are read and written; none for a view."""
    read = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
    written = {id(leaf): leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)}
    if not func._schema.is_mutable and _storages(written.values()) <= _storages(read.values()):
        return 0
    return sum(tensor.numel() * tensor.itemsize for tensor in {**read, **written}.values())


def _storages(tensors: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided}
