"""Operators on fake tensors, and their seconds: from what they compute, and what they read and write."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter
from torch.utils._pytree import tree_leaves

from hydra_ext.profile.cards import Speed

_GROUPED = torch.ops.aten._grouped_mm
_DRAWN = torch.ops.aten.rand
_ATTENTION_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def run_on_fakes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator inside a FakeTensorMode, also where torch has no fake of it.

    A single number that is drawn is 1/2. Models draw one to decide whether a layer is left out, which is then rare.
    """
    packet = getattr(func, "_overloadpacket", None)
    if packet is _GROUPED:
        return _grouped_product(*args, **kwargs)
    if packet is _DRAWN and not args[0]:
        return torch.tensor(0.5, dtype=kwargs.get("dtype"), device=kwargs.get("device"))
    return func(*args, **kwargs)


def _grouped_product(
    left: Tensor, right: Tensor, ends: Tensor | None = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The shape of a product of groups of rows, for any dtype; torch's own fake knows bfloat16 only."""
    shape: tuple[int, ...] = (left.size(-2), right.size(-1))
    if ends is not None and left.dim() == right.dim() == 2:
        shape = (ends.numel(), *shape)
    elif left.dim() == right.dim() == 3:
        shape = (left.size(0), *shape)
    return left.new_empty(shape, dtype=out_dtype or left.dtype)


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
    if packet is _GROUPED:  # each row meets one matrix
        left, right = args[0], args[1]
        return int(2 * left.numel() * right.size(-1))
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
